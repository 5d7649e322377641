//! A shared number below 2^b as a shared one-hot vector, and any public table of bits at a shared place.
//!
//! Short: a 1-of-2^b transfer. The client's share v chooses among the entries table[(server's share + v) mod 2^b], each
//! under a pad of its own: pad j is the exclusive or over the b bits of j of what the pad of that bit's random transfer
//! expands to at place j. The receiver lacks at least one term of every pad but its own. Long: the client's own one-hot
//! vector is rotated by the server's share, one bit of it at a time, each a correlated transfer of a whole vector.

use super::correlate::{Wiped, draw_received, draw_sent};
use super::wire::{Reader, Writer};
use super::{Bits, step_on, to_ring};
use crate::error::{Error, Result};
use crate::net::Kind;
use crate::party::Party;
use rand_chacha::ChaCha12Rng;
use rand_core::{RngCore, SeedableRng};
use std::hint::black_box;
use zeroize::Zeroize;

/// The widest index of a transfer 1-of-2^b.
pub const MAX_LOOKUP_BITS: u32 = 12;

/// A public table with 2^b entries of `width` bits.
pub struct BitTable {
    index_bits: u32,
    width: usize,
    rows: Vec<u8>,
}

impl BitTable {
    /// The table with `entry(place, bit)` at each place and bit.
    pub fn new(index_bits: u32, width: usize, entry: impl Fn(usize, usize) -> bool) -> Result<Self> {
        if !(1..=MAX_LOOKUP_BITS).contains(&index_bits) || width == 0 {
            return Err(Error::BadArgument(format!("a table of 2^{index_bits} entries of {width} bits")));
        }
        let bytes = width.div_ceil(8);
        let mut rows = vec![0; bytes << index_bits];
        for (place, row) in rows.chunks_exact_mut(bytes).enumerate() {
            (0..width).for_each(|bit| row[bit / 8] |= u8::from(entry(place, bit)) << (bit % 8));
        }
        Ok(Self { index_bits, width, rows })
    }

    fn row_bytes(&self) -> usize {
        self.width.div_ceil(8)
    }
}

/// XOR shares of table[index], `width` bits for each element in turn. `index` is shared modulo 2^b, b the table's.
///
/// Cost: one round there and back; b + (2^b - 1) width bits; b transfers.
pub fn lookup_bits(party: &mut Party, index: &[u64], table: &BitTable) -> Result<Bits> {
    step_on(party, "lookup", index.len(), |party| {
        if party.role.is_client() { receive_entries(party, index, table) } else { send_entries(party, index, table) }
    })
}

/// XOR shares of the vectors ([index = 0], ..., [index = width - 1]), `width` bits for each element in turn. `index` is
/// shared modulo 2^b.
///
/// Cost: for b <= 8 as [`lookup_bits`]; above, b rounds; b (2^b + 1) bits; b transfers.
pub fn one_hot(party: &mut Party, index: &[u64], b: u32, width: usize) -> Result<Bits> {
    if b > 20 || width > 1 << b {
        return Err(Error::BadArgument(format!("a one-hot vector of {width} places for an index of {b} bits")));
    }
    if b <= 8 {
        let table = BitTable::new(b, width, |place, bit| place == bit)?;
        return lookup_bits(party, index, &table);
    }
    step_on(party, "one_hot", index.len(), |party| rotate(party, index, b, width))
}

/// The bits of an index below `width`.
pub fn index_bits(width: usize) -> u32 {
    width.next_power_of_two().trailing_zeros().max(1)
}

/// [`one_hot`] of integers 0 <= x < width shared in Z_p, scale 1; width at most 2^20. Exact. Of x modulo
/// 2^[`index_bits`] it gives the vector, or zeros where that is width or more.
///
/// Cost with b = [`index_bits`]: that of [`one_hot`], and one round, 1 + b bits, 1 transfer.
pub fn one_hot_values(party: &mut Party, x: &[u64], width: usize) -> Result<Bits> {
    if !(1..=1 << 20).contains(&width) {
        return Err(Error::BadArgument(format!("one-hot vectors of {width} places; 1 to 2^20 are possible")));
    }
    let b = index_bits(width);
    let index = to_ring(party, x, 0, b)?;
    one_hot(party, &index, b, width)
}

/// Expands a pad. Every pad is a key used once, so the stream needs no tweak.
fn expand(pad: u128, out: &mut [u8]) {
    let mut key = [0; 32];
    key[..16].copy_from_slice(&pad.to_le_bytes());
    key[16..].copy_from_slice(&pad.to_le_bytes());
    ChaCha12Rng::from_seed(key).fill_bytes(out);
    key.zeroize();
}

fn xor_into(out: &mut [u8], by: &[u8]) {
    out.iter_mut().zip(by).for_each(|(o, b)| *o ^= b);
}

/// All pads of one transfer: row j is the exclusive or of what the pads of j's bits expand to.
fn all_pads(pads: &[[u128; 2]], bytes: usize, rows: &mut [u8], stream: &mut [u8]) {
    rows.fill(0);
    for (i, pair) in pads.iter().enumerate() {
        for (value, &pad) in pair.iter().enumerate() {
            expand(pad, stream);
            // The rows whose bit i has this value come in runs of 2^i, in the order of the stream.
            let run = bytes << i;
            let starts = (value * run..rows.len()).step_by(2 * run);
            starts.zip(stream.chunks_exact(run)).for_each(|(at, part)| xor_into(&mut rows[at..at + run], part));
        }
    }
}

/// table[(at + v) mod 2^b] in row v. The place is secret: every bit of it moves the whole table or does not.
fn rotated(table: &BitTable, at: u64, rows: &mut Vec<u8>, spare: &mut Vec<u8>) {
    rows.clone_from(&table.rows);
    for i in 0..table.index_bits {
        // Hidden from the compiler, which would otherwise make two loops of the one below and choose by the secret bit.
        let mask = black_box(((at >> i) as u8 & 1).wrapping_neg());
        let shift = table.row_bytes() << i;
        spare.clone_from(rows);
        let (head, tail) = spare.split_at(shift);
        let moved = tail.iter().chain(head);
        rows.iter_mut().zip(moved).for_each(|(row, &moved)| *row ^= mask & (*row ^ moved));
    }
}

/// Bits of a row that travel together.
const PIECE: usize = 48;

fn put_row(body: &mut Writer, row: &[u8], width: usize) {
    for (piece, start) in row.chunks(PIECE / 8).zip((0..width).step_by(PIECE)) {
        let mut word = [0; 8];
        word[..piece.len()].copy_from_slice(piece);
        let bits = PIECE.min(width - start) as u32;
        body.put(u64::from_le_bytes(word) & ((1 << bits) - 1), bits);
    }
}

fn take_row(body: &mut Reader, row: &mut [u8], width: usize) {
    for (piece, start) in row.chunks_mut(PIECE / 8).zip((0..width).step_by(PIECE)) {
        let word = body.take(PIECE.min(width - start) as u32).to_le_bytes();
        piece.copy_from_slice(&word[..piece.len()]);
    }
}

fn row_bits(row: &[u8], width: usize, out: &mut Bits) {
    out.extend((0..width).map(|bit| row[bit / 8] >> (bit % 8) & 1));
}

fn send_entries(party: &mut Party, index: &[u64], table: &BitTable) -> Result<Bits> {
    let (n, b, bytes) = (index.len(), table.index_bits as usize, table.row_bytes());
    let mut pads = Wiped::with_capacity(n * b);
    draw_sent(party, n * b, |pair| pads.push(pair))?;
    let mut choices = Reader::receive(&mut party.channel, Kind::Choices, (n * b).div_ceil(8))?;
    let mut body = Writer::with_capacity(n * ((1 << b) - 1) * table.width);
    let mut out = Bits::with_capacity(n * table.width);
    let (mut entries, mut spare) = (Vec::new(), Vec::new());
    let (mut covers, mut stream) = (Wiped::from(vec![0; table.rows.len()]), Wiped::from(vec![0; table.rows.len() / 2]));
    let mut share = vec![0; bytes];
    for (&at, pads) in index.iter().zip(pads.chunks_exact(b)) {
        let correction = choices.take(b as u32) as usize;
        all_pads(pads, bytes, &mut covers, &mut stream);
        rotated(table, at, &mut entries, &mut spare);
        for (v, entry) in entries.chunks_exact_mut(bytes).enumerate() {
            let cover = (v ^ correction) * bytes;
            xor_into(entry, &covers[cover..cover + bytes]);
            if v == 0 {
                share.copy_from_slice(entry);
                row_bits(&share, table.width, &mut out);
            } else {
                xor_into(entry, &share);
                put_row(&mut body, entry, table.width);
            }
        }
    }
    choices.finish(&mut party.channel)?;
    party.channel.send(Kind::Transfers, &body.finish())?;
    party.channel.flush()?;
    Ok(out)
}

fn receive_entries(party: &mut Party, index: &[u64], table: &BitTable) -> Result<Bits> {
    let (n, b, bytes) = (index.len(), table.index_bits as usize, table.row_bytes());
    let (mut random, mut pads) = (Wiped::with_capacity(n * b), Wiped::with_capacity(n * b));
    draw_received(party, n * b, |choice, pad| {
        random.push(choice);
        pads.push(pad);
    })?;
    let mut body = Writer::with_capacity(n * b);
    for (&at, random) in index.iter().zip(random.chunks_exact(b)) {
        body.put((at & ((1 << b) - 1)) ^ number(random), b as u32);
    }
    party.channel.send(Kind::Choices, &body.finish())?;

    // While the answers travel: the one pad of each element, picked out of the streams without an index.
    let mut rows = vec![0; n * bytes];
    let mut stream = Wiped::from(vec![0; table.rows.len() / 2]);
    for ((row, random), pads) in rows.chunks_exact_mut(bytes).zip(random.chunks_exact(b)).zip(pads.chunks_exact(b)) {
        let choice = number(random);
        for (i, &pad) in pads.iter().enumerate() {
            expand(pad, &mut stream);
            let place = (choice >> (i + 1)) << i | choice & ((1 << i) - 1);
            for (j, part) in stream.chunks_exact(bytes).enumerate() {
                let mask = equal_mask(j as u64, place);
                row.iter_mut().zip(part).for_each(|(r, p)| *r ^= p & mask);
            }
        }
    }

    let due = (n * ((1 << b) - 1) * table.width).div_ceil(8);
    let mut body = Reader::receive(&mut party.channel, Kind::Transfers, due)?;
    let mut out = Bits::with_capacity(n * table.width);
    let mut entry = vec![0; bytes];
    for (row, &at) in rows.chunks_exact_mut(bytes).zip(index) {
        for v in 1..1u64 << b {
            take_row(&mut body, &mut entry, table.width);
            let mask = equal_mask(v, at & ((1 << b) - 1));
            row.iter_mut().zip(&entry).for_each(|(r, e)| *r ^= e & mask);
        }
        row_bits(row, table.width, &mut out);
    }
    body.finish(&mut party.channel)?;
    Ok(out)
}

fn number(bits: &[u8]) -> u64 {
    bits.iter().rev().fold(0, |value, &bit| value << 1 | u64::from(bit))
}

/// 255 if a = b, else 0; both below 2^63.
#[inline(always)]
fn equal_mask(a: u64, b: u64) -> u8 {
    (((a ^ b).wrapping_sub(1) as i64) >> 63) as u8
}

/// Rotates the client's one-hot vectors by the server's indices. A vector is a row of bytes; N >= 512, so whole words.
fn rotate(party: &mut Party, index: &[u64], b: u32, width: usize) -> Result<Bits> {
    let client = party.role.is_client();
    let (n, places) = (index.len(), 1usize << b);
    let bytes = places / 8;
    let mut share = vec![0u8; n * bytes];
    if client {
        for (row, &at) in share.chunks_exact_mut(bytes).zip(index) {
            for (k, byte) in row.iter_mut().enumerate() {
                (0..8).for_each(|i| *byte |= equal_mask((8 * k + i) as u64, at & (places as u64 - 1)) & 1 << i);
            }
        }
    }
    for i in (0..b).rev() {
        // What a rotation by 2^i would change, of my share.
        let change: Vec<u8> = share.chunks_exact(bytes).flat_map(|row| difference(row, 1 << i)).collect();
        if client {
            let mut keep = Wiped::with_capacity(n);
            draw_sent(party, n, |pair| keep.push(pair))?;
            let mut body = change;
            let (mut first, mut second) = (Wiped::from(vec![0; bytes]), Wiped::from(vec![0; bytes]));
            let mut covers = Wiped::with_capacity(2 * n * bytes);
            for (&[m0, m1], part) in keep.iter().zip(body.chunks_exact_mut(bytes)) {
                expand(m0, &mut first);
                expand(m1, &mut second);
                covers.extend_from_slice(&first);
                covers.extend_from_slice(part);
                xor_into(part, &first);
                xor_into(part, &second);
            }
            party.channel.send(Kind::Transfers, &body)?;
            let mut flips = Reader::receive(&mut party.channel, Kind::Choices, n.div_ceil(8))?;
            let flipped = flips.flags(n);
            flips.finish(&mut party.channel)?;
            // m0 XOR d y.
            for ((row, cover), d) in share.chunks_exact_mut(bytes).zip(covers.chunks_exact(2 * bytes)).zip(flipped) {
                let (m0, y) = cover.split_at(bytes);
                xor_into(row, m0);
                row.iter_mut().zip(y).for_each(|(r, y)| *r ^= y & d.wrapping_neg());
            }
        } else {
            let (mut random, mut pads) = (Wiped::with_capacity(n), Wiped::with_capacity(n));
            draw_received(party, n, |choice, pad| {
                random.push(choice);
                pads.push(pad);
            })?;
            let bits: Vec<u8> = index.iter().map(|&v| (v >> i) as u8 & 1).collect();
            let mut body = Writer::with_capacity(n + 8);
            body.flags(&super::xor(&bits, &random));
            party.channel.send(Kind::Choices, &body.finish())?;
            let opened = party.channel.receive(Kind::Transfers, n * bytes)?;
            let mut stream = Wiped::from(vec![0; bytes]);
            for (k, row) in share.chunks_exact_mut(bytes).enumerate() {
                let part = k * bytes..(k + 1) * bytes;
                expand(pads[k], &mut stream);
                xor_into(row, &stream);
                let (own, chosen) = (bits[k].wrapping_neg(), random[k].wrapping_neg());
                for ((r, o), u) in row.iter_mut().zip(&change[part.clone()]).zip(&opened[part]) {
                    *r ^= (o & own) ^ (u & chosen);
                }
            }
        }
    }
    let mut out = Bits::with_capacity(n * width);
    share.chunks_exact(bytes).for_each(|row| row_bits(row, width, &mut out));
    Ok(out)
}

/// A row XOR itself with every bit moved up by `by` places, cyclically.
fn difference(row: &[u8], by: usize) -> Vec<u8> {
    let (whole, part) = (by / 8, by % 8);
    let at = |k: usize| row[(k + 2 * row.len() - whole) % row.len()];
    (0..row.len())
        .map(|k| {
            let moved = if part == 0 { at(k) } else { at(k) << part | at(k + row.len() - 1) >> (8 - part) };
            row[k] ^ moved
        })
        .collect()
}
