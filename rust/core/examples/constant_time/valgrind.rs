//! The three requests to valgrind that are needed. A request is a sequence of instructions that does nothing on a
//! processor and that valgrind recognises.

#[cfg(target_arch = "x86_64")]
fn request(number: u64, a: u64, b: u64) -> u64 {
    let arguments = [number, a, b, 0, 0, 0];
    let mut answer = 0u64;
    // SAFETY: four rotations of rdi that add up to 128 bits, and an exchange of rbx with itself: nothing changes but
    // rdx, which is declared. Valgrind reads the six words at rax, which live until the end of this function.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            inout("rdx") answer, in("rax") arguments.as_ptr(), inout("rdi") 0u64 => _,
        );
    }
    answer
}

#[cfg(not(target_arch = "x86_64"))]
fn request(_: u64, _: u64, _: u64) -> u64 {
    0
}

/// Whether this runs under valgrind.
pub fn is_here() -> bool {
    request(0x1001, 0, 0) != 0
}

/// Errors reported so far.
pub fn errors() -> u64 {
    request(0x1201, 0, 0)
}

/// Marks memory as undefined: whatever depends on it is followed, and a branch on it is reported.
pub fn undefine<T: Copy>(values: &mut [T]) {
    request(0x4d43_0001, values.as_mut_ptr() as u64, size_of_val(values) as u64);
}
