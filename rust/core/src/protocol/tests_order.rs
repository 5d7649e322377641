//! Order: ranks, masks, one-hot vectors, dispatch, against sorting in the clear.

use super::tests::{values, xored};
use super::*;
use crate::testing::{open, parties, run, share};

/// Ranks in the clear: 0 is the largest, the earlier of equal ones first.
fn ranks(row: &[i64]) -> Vec<usize> {
    (0..row.len()).map(|i| (0..row.len()).filter(|&j| row[j] > row[i] || (row[j] == row[i] && j < i)).count()).collect()
}

/// Rows with many ties.
fn scores(count: usize, length: usize, bound: i64) -> Vec<i64> {
    let mut x = values(count * length, bound);
    for i in (0..x.len()).step_by(3) {
        x[i] = x[i / 2];
    }
    x.iter_mut().skip(length / 2).take(length).for_each(|v| *v = 0);
    x
}

#[test]
fn a_table_is_looked_up_at_every_place() {
    for (b, width) in [(1, 1), (3, 5), (6, 1), (7, 24), (7, 70), (9, 3)] {
        let places = 1u64 << b;
        let index: Vec<u64> = (0..places).collect();
        let mine: Vec<u64> = index.iter().map(|i| i.wrapping_mul(0x9e37_79b9) & (places - 1)).collect();
        let rest: Vec<u64> = index.iter().zip(&mine).map(|(i, m)| i.wrapping_sub(*m) & (places - 1)).collect();
        let entry = |place: usize, bit: usize| (place * 31 + bit * 17 + place * bit) % 5 < 2;
        let table = BitTable::new(b, width, entry).unwrap();
        let (c, s) = run(|p| lookup_bits(p, &mine, &table), |p| lookup_bits(p, &rest, &table));
        let got = xored(&c.unwrap(), &s.unwrap());
        for (place, row) in got.chunks(width).enumerate() {
            assert!(row.iter().enumerate().all(|(bit, &g)| (g == 1) == entry(place, bit)), "{b} {width} {place}");
        }
    }
}

#[test]
fn one_hot_vectors_short_and_long() {
    for (b, width) in [(4, 16), (7, 24), (8, 256), (9, 512), (10, 7)] {
        let places = 1u64 << b;
        let index: Vec<u64> = (0..places).step_by(if b > 8 { 37 } else { 1 }).collect();
        let mine: Vec<u64> = index.iter().map(|i| (i * 0x9e37_79b9 + 5) & (places - 1)).collect();
        let rest: Vec<u64> = index.iter().zip(&mine).map(|(i, m)| i.wrapping_sub(*m) & (places - 1)).collect();
        let (c, s) = run(|p| one_hot(p, &mine, b, width), |p| one_hot(p, &rest, b, width));
        let got = xored(&c.unwrap(), &s.unwrap());
        for (row, &i) in got.chunks(width).zip(&index) {
            assert!(row.iter().enumerate().all(|(bit, &g)| (g == 1) == (bit as u64 == i)), "{b} {width} {i}");
        }
    }
}

#[test]
fn one_hot_vectors_of_numbers_in_the_field() {
    for width in [1usize, 2, 3, 16, 24, 256, 257, 700] {
        // All of them, and what lies beyond: that has no place.
        let index: Vec<i64> = (0..width as i64).step_by(1 + width / 40).chain([width as i64]).collect();
        let (a, b) = share(&index);
        let (c, s) = run(|p| one_hot_values(p, &a, width), |p| one_hot_values(p, &b, width));
        let got = xored(&c.unwrap(), &s.unwrap());
        for (row, &i) in got.chunks(width).zip(&index) {
            let place = i as usize % (1 << index_bits(width));
            assert!(row.iter().enumerate().all(|(bit, &g)| (g == 1) == (bit == place)), "{width} {i}");
        }
    }
}

#[test]
fn ranks_in_the_field_are_those_of_the_ring() {
    for (length, kappa) in [(1, 8), (2, 8), (3, 41), (5, 41), (8, 12), (64, 17), (65, 17), (128, 9)] {
        let rows = Rows { length, kappa, drop_bits: 0 };
        let x = scores(4, length, 1 << (kappa - 2));
        let (a, b) = share(&x);
        let (c, s) = run(|p| rank(p, &a, rows), |p| rank(p, &b, rows));
        let got = open(&c.unwrap(), &s.unwrap());
        let due: Vec<i64> = x.chunks(length).flat_map(ranks).map(|rank| rank as i64).collect();
        assert_eq!(got, due, "{rows:?}");
    }
}

#[test]
fn ranks_are_a_permutation_with_ties_by_place() {
    for (length, kappa, drop_bits) in [(1, 8, 0), (2, 8, 0), (5, 41, 0), (64, 17, 0), (33, 12, 6), (16, 20, 20)] {
        let rows = Rows { length, kappa, drop_bits };
        let x = scores(3, length, (1 << (kappa - 2 + drop_bits)) - (1 << drop_bits));
        let (a, b) = share(&x);
        let (c, s) = run(|p| rank_all_pairs(p, &a, rows), |p| rank_all_pairs(p, &b, rows));
        let (c, s) = (c.unwrap(), s.unwrap());
        let got: Vec<usize> =
            c.iter().zip(&s).map(|(c, s)| ((c + s) & ((1 << rows.rank_bits()) - 1)) as usize).collect();
        for (got, x) in got.chunks(length).zip(x.chunks(length)) {
            if drop_bits == 0 {
                assert_eq!(got, ranks(x));
            }
            let mut sorted = got.to_vec();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..length));
            for i in 0..length {
                for j in 0..length {
                    assert!(x[i] < x[j] + (2 << drop_bits) || got[i] < got[j], "more than the dropped bits apart");
                }
            }
        }
    }
}

#[test]
fn exactly_k_are_chosen_by_either_plan() {
    let instant = Link { bytes_per_second: 1.0, round_seconds: 0.0 };
    for (length, k, link) in [(64, 6, Link::LAN), (64, 0, Link::LAN), (64, 64, Link::LAN), (130, 7, instant)] {
        let rows = Rows { length, kappa: 17, drop_bits: 0 };
        let x = scores(4, length, 1 << 15);
        let (a, b) = share(&x);
        let (c, s) = run(|p| top_k_mask(p, &a, rows, k, &link), |p| top_k_mask(p, &b, rows, k, &link));
        let got = xored(&c.unwrap(), &s.unwrap());
        for (got, x) in got.chunks(length).zip(x.chunks(length)) {
            assert!(got.iter().zip(ranks(x)).all(|(&g, r)| (g == 1) == (r < k)));
        }
        if link == instant {
            assert_eq!(plan(rows, 4, &link), Plan::Network);
        }
    }
}

#[test]
fn differences_at_the_ends_of_their_range_are_in_order() {
    let instant = Link { bytes_per_second: 1.0, round_seconds: 0.0 };
    for (length, kappa, drop_bits) in [(64, 17, 0), (64, 8, 6), (64, 17, 6), (64, 19, 20), (160, 17, 6), (160, 8, 0)] {
        let rows = Rows { length, kappa, drop_bits };
        let left = (1i64 << (kappa - 1)) - if drop_bits > 0 { 2 } else { 0 };
        let most = (left << drop_bits) - 1;
        // Low scores and, as far above them as is allowed, high ones; somewhere in the range of values.
        let x: Vec<i64> = [0, 12_345, -most / 2, -most]
            .iter()
            .flat_map(|&low| (0..length).map(move |i| if i % 3 == 1 { low + most } else { low }))
            .collect();
        let (high, (a, b)) = ((length + 1) / 3, share(&x));
        let (c, s) = run(|p| top_k_mask(p, &a, rows, high, &instant), |p| top_k_mask(p, &b, rows, high, &instant));
        let chosen = xored(&c.unwrap(), &s.unwrap());
        assert!((0..x.len()).all(|i| (chosen[i] == 1) == (i % length % 3 == 1)), "{rows:?}");
        let (c, s) = run(|p| rank_all_pairs(p, &a, rows), |p| rank_all_pairs(p, &b, rows));
        let (c, s) = (c.unwrap(), s.unwrap());
        for i in 0..x.len() {
            let rank = (c[i] + s[i]) & ((1 << rows.rank_bits()) - 1);
            assert!((rank < high as u64) == (i % length % 3 == 1), "{rows:?}: rank {rank}");
        }
    }
}

#[test]
fn equal_scores_with_dropped_bits_still_give_exactly_k() {
    let instant = Link { bytes_per_second: 1.0, round_seconds: 0.0 };
    for length in [40, 150] {
        let rows = Rows { length, kappa: 12, drop_bits: 5 };
        let (a, b) = share(&vec![1003; 8 * length]);
        let (c, s) = run(|p| top_k_mask(p, &a, rows, 7, &instant), |p| top_k_mask(p, &b, rows, 7, &instant));
        let chosen = xored(&c.unwrap(), &s.unwrap());
        assert!(chosen.chunks(length).all(|row| row.iter().filter(|&&bit| bit == 1).count() == 7));
    }
}

type Ordering = fn(&mut Party, &[u64], Rows, &Link) -> Result<()>;

#[test]
fn rows_that_no_plan_orders_are_refused_before_a_byte() {
    let (mut p, _peer) = parties();
    let row = |length, kappa, drop_bits| Rows { length, kappa, drop_bits };
    let slow_rounds = Link { bytes_per_second: 1e15, round_seconds: 1e9 };
    let all: [Ordering; 5] = [
        |p, x, rows, link| top_k_mask(p, x, rows, 1, link).map(drop),
        |p, x, rows, link| dispatch_bits(p, x, rows, 1, link).map(drop),
        |p, x, rows, link| dispatch_ranks(p, x, rows, 1, link).map(drop),
        |p, x, rows, _| rank_all_pairs(p, x, rows).map(drop),
        |p, x, rows, _| rank(p, x, rows).map(drop),
    ];
    for step in all {
        for (kappa, drop_bits) in [(0, 0), (1, 0), (42, 0), (u32::MAX, 0), (41, 1), (8, 33), (8, u32::MAX)] {
            for length in [1, 64, 200, 8192] {
                let got = step(&mut p, &vec![0; length], row(length, kappa, drop_bits), &Link::LAN);
                assert!(matches!(got, Err(Error::BadArgument(_))), "{kappa} {drop_bits} {length}: {got:?}");
            }
        }
        assert!(matches!(step(&mut p, &[0; 8], row(0, 17, 0), &Link::LAN), Err(Error::BadArgument(_))));
        // 40 bits and 13 of the place are more than a network's keys have.
        for rows in [row(4097, 40, 0), row(5000, 36, 2), row(65_537, 17, 0), row(1 << 20, 17, 0)] {
            let got = step(&mut p, &vec![0; rows.length], rows, &Link::LAN);
            assert!(matches!(&got, Err(Error::Unsupported(e)) if e.contains("4096") || e.contains("65536")), "{got:?}");
        }
        assert!(step(&mut p, &[], row(usize::MAX, 17, 0), &Link::LAN).is_err());
    }
    assert!(matches!(rank_all_pairs(&mut p, &[0; 4097], row(4097, 17, 0)), Err(Error::Unsupported(_))));
    assert!(maximum(&mut p, &[0; 4], row(4, 1, 0)).is_err());
    // However dear its rounds are, the network is the plan where all pairs cannot be.
    assert_eq!(plan(row(4096, 17, 0), 1, &slow_rounds), Plan::AllPairs);
    assert_eq!(plan(row(4097, 17, 0), 1, &slow_rounds), Plan::Network);
    assert_eq!(p.channel.costs().iter().map(|s| s.messages_sent).sum::<u64>(), 0);
    assert!(!p.channel.is_over());
}

#[test]
fn the_dispatch_matrix_puts_each_rank_into_its_slot_by_either_plan() {
    let instant = Link { bytes_per_second: 1.0, round_seconds: 0.0 };
    for (length, slots, link) in [(24, 5, Link::LAN), (64, 64, Link::LAN), (140, 9, instant), (600, 3, instant)] {
        let rows = Rows { length, kappa: 16, drop_bits: 0 };
        let x = scores(3, length, 1 << 14);
        let (a, b) = share(&x);
        let (c, s) = run(|p| dispatch_ranks(p, &a, rows, slots, &link), |p| dispatch_ranks(p, &b, rows, slots, &link));
        let got = open(&c.unwrap(), &s.unwrap());
        for (got, x) in got.chunks(slots * length).zip(x.chunks(length)) {
            let ranks = ranks(x);
            for (slot, row) in got.chunks(length).enumerate() {
                assert!(row.iter().zip(&ranks).all(|(&g, &r)| g == i64::from(r == slot)));
            }
        }
    }
}

#[test]
fn the_largest_of_a_row() {
    for length in [1, 2, 3, 7, 64] {
        for (kappa, bound) in [(41, 1 << 37), (18, 1 << 16)] {
            let rows = Rows { length, kappa, drop_bits: 0 };
            let x = scores(5, length, bound);
            let (a, b) = share(&x);
            let (c, s) = run(|p| maximum(p, &a, rows), |p| maximum(p, &b, rows));
            let plain: Vec<i64> = x.chunks(length).map(|row| *row.iter().max().unwrap()).collect();
            assert_eq!(open(&c.unwrap(), &s.unwrap()), plain);
        }
    }
}
