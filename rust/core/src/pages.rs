//! Memory for large arrays, on large pages where the system has them.
//!
//! The products go through hundreds of megabytes: with small pages a tenth of their time is spent finding these, and the first touch
//! of each costs more than copying what it holds.

/// So many zeros, for which large pages were asked before anything touched them.
pub fn zeros<T: Copy + Default>(length: usize) -> Vec<T> {
    let memory = vec![T::default(); length];
    ask_for_large_pages(&memory);
    memory
}

fn ask_for_large_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 2 << 20;
        let all = memory.as_ptr_range();
        let first = all.start.addr().next_multiple_of(PAGE);
        let end = all.end.addr() / PAGE * PAGE;
        if first < end {
            let from = all.start.with_addr(first).cast_mut().cast();
            // SAFETY: the pages are ours from end to end, and the advice changes nothing in them. Refused, it costs time.
            unsafe { libc::madvise(from, end - first, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}
