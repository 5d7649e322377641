//! Base transfers from ML-KEM-768 (FIPS 203), after Masny and Rindal (eprint 2019/706).
//!
//! An encapsulation key is a vector t of 768 numbers modulo 3329 and a public seed. The receiver sends two vectors
//! r_0, r_1 and one seed, where t_b = r_b + H(r_(1-b)) is a key it made and the other sum is a vector that the hash
//! decided; a key looks uniform, so the sender sees no difference. The sender encapsulates to both sums; the receiver
//! can open one. Cost: 2,336 bytes a transfer one way, 2,176 back, one round.

use super::Block;
use super::aes::Domain;
use crate::error::{Error, Result};
use crate::net::{Channel, Kind};
use crate::random::{PublicSeed, SecretRng};
use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, EncapsulationKey, ML_KEM_768};
use rand_core::RngCore;
use zeroize::{Zeroize, Zeroizing};

const Q: u16 = 3329;
/// Numbers of one key.
const NUMBERS: usize = 768;
/// Bytes of the packed vector: 12 bits a number.
const VECTOR: usize = NUMBERS * 3 / 2;
const SEED: usize = 32;
const REQUEST: usize = 2 * VECTOR + SEED;
const CIPHERTEXT: usize = 1088;

pub(super) type Vector = [u16; NUMBERS];

pub(super) fn pack(vector: &Vector) -> [u8; VECTOR] {
    let mut out = [0; VECTOR];
    for (three, two) in out.chunks_exact_mut(3).zip(vector.chunks_exact(2)) {
        let both = two[0] as u32 | (two[1] as u32) << 12;
        three.copy_from_slice(&both.to_le_bytes()[..3]);
    }
    out
}

/// `None` if a number is not below the modulus.
pub(super) fn unpack(bytes: &[u8]) -> Option<Vector> {
    let mut out = [0; NUMBERS];
    for (three, two) in bytes.chunks_exact(3).zip(out.chunks_exact_mut(2)) {
        let both = u32::from_le_bytes([three[0], three[1], three[2], 0]);
        two[0] = (both & 0xfff) as u16;
        two[1] = (both >> 12) as u16;
    }
    (bytes.len() == VECTOR && out.iter().all(|&x| x < Q)).then_some(out)
}

/// A uniform vector from a seed, by rejection.
fn uniform(seed: [u8; 32]) -> Vector {
    let mut stream = PublicSeed(seed).stream(0);
    let mut out = [0; NUMBERS];
    let mut have = 0;
    while have < NUMBERS {
        let candidate = (stream.next_u32() & 0xfff) as u16;
        if candidate < Q {
            out[have] = candidate;
            have += 1;
        }
    }
    out
}

/// The hash of one vector into vectors, for one transfer and one of its two places.
fn hash(domain: &Domain, index: usize, place: u8, vector: &[u8]) -> Vector {
    let mut seed = [0; 32];
    for (part, half) in seed.chunks_exact_mut(16).enumerate() {
        half.copy_from_slice(&domain.extract(index as u64, 16 + 2 * place + part as u8, &[vector]).to_le_bytes());
    }
    uniform(seed)
}

/// a + b or a - b, number by number, without a branch.
fn combine(a: &Vector, b: &Vector, subtract: bool) -> Vector {
    std::array::from_fn(|i| {
        let sum = if subtract { a[i] + (Q - b[i]) } else { a[i] + b[i] };
        let less = sum.wrapping_sub(Q);
        // The top bit of `less` tells that the sum was below the modulus already.
        less.wrapping_add(Q & (less >> 15).wrapping_neg())
    })
}

fn internal<E>(_: E) -> Error {
    Error::Unsupported("the ML-KEM implementation refused an operation on valid data".into())
}

pub(super) fn send(channel: &mut Channel, domain: &Domain, n: usize) -> Result<Zeroizing<Vec<[Block; 2]>>> {
    let requests = channel.receive(Kind::BaseOt, n * REQUEST)?;
    let mut answer = Vec::with_capacity(n * 2 * CIPHERTEXT);
    let mut pads = Zeroizing::new(Vec::with_capacity(n));
    for (i, request) in requests.chunks_exact(REQUEST).enumerate() {
        let (vectors, seed) = request.split_at(2 * VECTOR);
        let mut pair = [0; 2];
        for place in 0..2 {
            let own = &vectors[place * VECTOR..(place + 1) * VECTOR];
            let other = &vectors[(1 - place) * VECTOR..(2 - place) * VECTOR];
            let Some(numbers) = unpack(own) else {
                return Err(channel.refuse("a key of a base transfer is not reduced"));
            };
            let key = combine(&numbers, &hash(domain, i, place as u8, other), false);
            let key = [&pack(&key)[..], seed].concat();
            let key = EncapsulationKey::new(&ML_KEM_768, &key).map_err(internal)?;
            let (ciphertext, secret) = key.encapsulate().map_err(internal)?;
            pair[place] = domain.extract(i as u64, place as u8, &[request, ciphertext.as_ref(), secret.as_ref()]);
            answer.extend_from_slice(ciphertext.as_ref());
        }
        pads.push(pair);
        pair.zeroize();
    }
    channel.send(Kind::BaseOt, &answer)?;
    channel.flush()?;
    Ok(pads)
}

pub(super) fn receive(
    channel: &mut Channel,
    domain: &Domain,
    choices: &[u8],
    rng: &mut SecretRng,
) -> Result<Zeroizing<Vec<Block>>> {
    let mut requests = Vec::with_capacity(choices.len() * REQUEST);
    let mut keys = Vec::with_capacity(choices.len());
    for (i, &choice) in choices.iter().enumerate() {
        let key = DecapsulationKey::generate(&ML_KEM_768).map_err(internal)?;
        let public = key.encapsulation_key().and_then(|k| k.key_bytes()).map_err(internal)?;
        let (vector, seed) = public.as_ref().split_at(VECTOR);
        let vector = unpack(vector).ok_or(()).map_err(internal)?;
        let mut coins = [0; 32];
        rng.fill(&mut coins);
        let blind = uniform(coins);
        coins.zeroize();
        let packed = pack(&blind);
        // Both possible answers are computed, so that the time does not tell which one is sent.
        let masked = [0, 1].map(|place| combine(&vector, &hash(domain, i, place, &packed), true));
        let right = ((choice & 1) as u16).wrapping_neg();
        let real: Vector = std::array::from_fn(|j| (masked[0][j] & !right) | (masked[1][j] & right));
        let first: Vector = std::array::from_fn(|j| (real[j] & !right) | (blind[j] & right));
        let second: Vector = std::array::from_fn(|j| (blind[j] & !right) | (real[j] & right));
        requests.extend_from_slice(&pack(&first));
        requests.extend_from_slice(&pack(&second));
        requests.extend_from_slice(seed);
        keys.push(key);
    }
    channel.send(Kind::BaseOt, &requests)?;
    let answer = channel.receive(Kind::BaseOt, choices.len() * 2 * CIPHERTEXT)?;
    let mut pads = Zeroizing::new(Vec::with_capacity(choices.len()));
    for (i, (key, pair)) in keys.iter().zip(answer.chunks_exact(2 * CIPHERTEXT)).enumerate() {
        let right = choices[i] & 1;
        let mask = right.wrapping_neg();
        let mine: Vec<u8> = (0..CIPHERTEXT).map(|j| (pair[j] & !mask) | (pair[CIPHERTEXT + j] & mask)).collect();
        // A wrong ciphertext of the right length decapsulates to a pseudorandom secret (FIPS 203): no error to see.
        let secret = key.decapsulate(Ciphertext::from(&mine[..])).map_err(internal)?;
        let request = &requests[i * REQUEST..(i + 1) * REQUEST];
        pads.push(domain.extract(i as u64, right, &[request, &mine, secret.as_ref()]));
    }
    Ok(pads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_pack_exactly_and_add_modulo_q() {
        let (a, b) = (uniform([1; 32]), uniform([2; 32]));
        assert_eq!(unpack(&pack(&a)), Some(a));
        assert_eq!(combine(&combine(&a, &b, false), &b, true), a);
        assert!(combine(&a, &b, false).iter().zip(a.iter().zip(&b)).all(|(c, (a, b))| *c == (a + b) % Q));
        let mut over = a;
        over[767] = Q;
        assert_eq!(unpack(&pack(&over)), None);
        assert_eq!(unpack(&[0; VECTOR - 1]), None);
    }
}
