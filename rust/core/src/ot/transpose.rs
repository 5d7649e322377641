//! Transposition of 128 x 128 bit matrices: columns, as the extension makes them, into one block per transfer.

use super::Block;

/// Transposes in place: bit j of `rows[i]` and bit i of `rows[j]` change places.
pub(super) fn transpose(rows: &mut [Block; 128]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, checked in the line above.
        unsafe { transpose_avx2(rows) };
        return;
    }
    transpose_portable(rows);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn transpose_avx2(rows: &mut [Block; 128]) {
    transpose_portable(rows);
}

/// Seven rounds: in round s, the off-diagonal s x s squares of each 2s x 2s square change places. The loops are plain
/// enough for the compiler to use whatever vectors the caller's target has.
#[inline(always)]
fn transpose_portable(rows: &mut [Block; 128]) {
    let (mut low, mut high) = ([0u64; 128], [0u64; 128]);
    for i in 0..64 {
        let (a, b) = (rows[i], rows[i + 64]);
        (low[i], high[i]) = (a as u64, b as u64);
        (low[i + 64], high[i + 64]) = ((a >> 64) as u64, (b >> 64) as u64);
    }
    for half in [&mut low, &mut high] {
        swap_round::<32>(half, 0x0000_0000_ffff_ffff);
        swap_round::<16>(half, 0x0000_ffff_0000_ffff);
        swap_round::<8>(half, 0x00ff_00ff_00ff_00ff);
        swap_round::<4>(half, 0x0f0f_0f0f_0f0f_0f0f);
        swap_round::<2>(half, 0x3333_3333_3333_3333);
        swap_round::<1>(half, 0x5555_5555_5555_5555);
    }
    for (i, row) in rows.iter_mut().enumerate() {
        *row = low[i] as u128 | (high[i] as u128) << 64;
    }
}

#[inline(always)]
fn swap_round<const S: usize>(rows: &mut [u64; 128], mask: u64) {
    for square in rows.chunks_exact_mut(2 * S) {
        let (upper, lower) = square.split_at_mut(S);
        for (a, b) in upper.iter_mut().zip(lower) {
            let t = ((*a >> S) ^ *b) & mask;
            *b ^= t;
            *a ^= t << S;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SecretRng;

    #[test]
    fn bit_by_bit_it_is_the_transposed_matrix() {
        let mut rng = SecretRng::from_os();
        let rows: [Block; 128] = std::array::from_fn(|_| rng.next_u64() as u128 | (rng.next_u64() as u128) << 64);
        let (mut fast, mut portable) = (rows, rows);
        transpose(&mut fast);
        transpose_portable(&mut portable);
        assert_eq!(fast, portable);
        for (i, new) in fast.iter().enumerate() {
            for (j, old) in rows.iter().enumerate() {
                assert_eq!(new >> j & 1, old >> i & 1);
            }
        }
    }
}
