//! Multiplication triples and squares in Z_p, from slot encryption: exact, and made without any input.
//!
//! The client encrypts its shares a0 and b0, 8192 of each in the slots of a polynomial. The server, with uniform shares a1 and b1 of its own,
//! returns a0 b1 + b0 a1 minus a uniform mask, flooded and with a fresh encryption of zero, as every answer. Then
//! c0 = a0 b0 + (what the client decrypts) and c1 = a1 b1 + mask. A square needs one request: a0^2 + 2 a0 a1 + a1^2.
//!
//! Cost: one round for any number; 27.3 + 11.9 bytes a triple and 13.6 + 11.9 a square on the wire, because the client's shares
//! are random and [`short`] leaves out of a request what randomness makes superfluous. Security: the server sees
//! ciphertexts; the client sees flooded answers (see `AnswerPlan::slots`), so both shares stay uniform to the other party.

mod short;

use crate::error::{Error, Result};
use crate::field::{self, P};
use crate::net::{Channel, Kind};
use crate::party::{TripleSupply, Triples};
use crate::random::SecretRng;
use crate::rlwe::params::Shape;
use crate::rlwe::{Answer, AnswerPlan, Ciphertext, HidingBudget, LEVELS, N, PublicKey, SecretKey, finish_slots, slots};
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::Arc;
use zeroize::{Zeroize, Zeroizing};

/// A short request as bytes: their number, and whether some bytes are one. For tests and fuzzers.
#[cfg(any(test, feature = "insecure-test-dealer"))]
pub mod foreign {
    use super::{LEVELS, N, short};
    use crate::field;
    use crate::random::{PublicSeed, SecretRng};
    use crate::rlwe::SecretKey;

    /// A short request as a client sends it.
    pub fn good_short_request() -> Vec<u8> {
        let mut rng = SecretRng::from_insecure_fixed_seed(1);
        let mut plain = field::random_vector(&mut rng, N);
        let key = SecretKey::generate(&mut rng);
        short::shorten(key.encrypt(LEVELS, &plain, &mut rng), &mut plain)
    }

    /// Reads one; there is nothing to write again, because the server computes with it at once.
    pub fn short_request(bytes: &[u8]) -> bool {
        short::expand(bytes, &PublicSeed([7; 32])).is_ok()
    }
}

/// Batches (of 8192) in one message.
const BATCHES_A_MESSAGE: usize = 4;
/// Most correlations that one call may ask for: 2^26, about three gigabytes at each party.
const MOST: usize = 1 << 26;

/// Shares of uniform a and of c = a^2 in Z_p, one-time.
pub struct Squares {
    /// Shares of a.
    pub a: Vec<u64>,
    /// Shares of a^2.
    pub c: Vec<u64>,
}

/// What one batch makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Correlation {
    Triple,
    Square,
}

impl Correlation {
    /// Request ciphertexts of one batch.
    fn requests(self) -> usize {
        match self {
            Correlation::Triple => 2,
            Correlation::Square => 1,
        }
    }

    fn answer_plan(self) -> Result<AnswerPlan> {
        // A square's plaintext is 2 a1, again a field element: never more than a triple's two products.
        AnswerPlan::slots(&Shape { level: LEVELS, products: 2, nonzero: N, magnitude: P as f64 / 2.0, rotations: 0 })
    }
}

enum Keys {
    Client(Arc<SecretKey>),
    Server(Arc<PublicKey>),
}

impl Keys {
    fn budget(&self) -> &HidingBudget {
        match self {
            Keys::Client(key) => key.budget(),
            Keys::Server(key) => key.budget(),
        }
    }
}

/// Unused correlations of one kind: [a, b, c], or [a, c] for squares. Taken from the end, so each is given out once.
struct Stock(Vec<Vec<u64>>);

impl Stock {
    fn len(&self) -> usize {
        self.0[0].len()
    }

    /// Makes room for `n` more, so that appending does not move the stock and leave copies behind.
    fn room(&mut self, n: usize) {
        for stock in &mut self.0 {
            if stock.capacity() - stock.len() < n {
                let mut fresh = Vec::with_capacity(stock.len() + n);
                fresh.extend_from_slice(stock);
                stock.zeroize();
                *stock = fresh;
            }
        }
    }

    /// Appends a batch, for which [`Stock::room`] has made room.
    fn put(&mut self, batch: &[Zeroizing<Vec<u64>>]) {
        debug_assert!(self.0.iter().zip(batch).all(|(stock, new)| stock.capacity() - stock.len() >= new.len()));
        self.0.iter_mut().zip(batch).for_each(|(stock, new)| stock.extend_from_slice(new));
    }

    /// The last `n`; what is taken is wiped from the stock.
    fn take(&mut self, n: usize) -> Vec<Vec<u64>> {
        let rest = self.len() - n;
        self.0
            .iter_mut()
            .map(|stock| {
                let out = stock[rest..].to_vec();
                stock[rest..].zeroize();
                stock.truncate(rest);
                out
            })
            .collect()
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// A supply of triples (and squares) that makes its own by encryption, with a stock. Both parties must ask for the same
/// numbers in the same order; nothing is given out twice.
pub struct EncryptedTriples {
    keys: Keys,
    pool: Option<Arc<ThreadPool>>,
    rng: SecretRng,
    triples: Stock,
    squares: Stock,
}

impl EncryptedTriples {
    /// The client's end.
    pub fn client(key: Arc<SecretKey>) -> Self {
        Self::new(Keys::Client(key))
    }

    /// The server's end.
    pub fn server(key: Arc<PublicKey>) -> Self {
        Self::new(Keys::Server(key))
    }

    fn new(keys: Keys) -> Self {
        let (triples, squares) = (Stock(vec![vec![]; 3]), Stock(vec![vec![]; 2]));
        Self { keys, pool: None, rng: SecretRng::from_os(), triples, squares }
    }

    /// Works on the threads of this pool, instead of on those of the process. They are never held while the peer is
    /// waited for, so both parties may share a pool.
    pub fn with_pool(mut self, pool: Arc<ThreadPool>) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Triples in stock.
    pub fn stock(&self) -> usize {
        self.triples.len()
    }

    /// Makes sure that `n` triples are in stock: what can be done before there is an input. Made in batches of 8192.
    pub fn refill(&mut self, channel: &mut Channel, n: usize) -> Result<()> {
        self.fill(channel, Correlation::Triple, n)
    }

    /// The same for squares.
    pub fn refill_squares(&mut self, channel: &mut Channel, n: usize) -> Result<()> {
        self.fill(channel, Correlation::Square, n)
    }

    /// The next `n` squares. May talk to the peer when the stock is low.
    pub fn squares(&mut self, channel: &mut Channel, n: usize) -> Result<Squares> {
        self.fill(channel, Correlation::Square, n)?;
        let [a, c] = self.squares.take(n).try_into().expect("a stock of squares has two columns");
        Ok(Squares { a, c })
    }

    fn fill(&mut self, channel: &mut Channel, what: Correlation, n: usize) -> Result<()> {
        if n > MOST {
            return Err(Error::Unsupported(format!("{n} correlations at a time; at most {MOST}")));
        }
        let stock = match what {
            Correlation::Triple => &mut self.triples,
            Correlation::Square => &mut self.squares,
        };
        let batches = n.saturating_sub(stock.len()).div_ceil(N);
        if batches == 0 {
            return Ok(());
        }
        self.keys.budget().check(&what.answer_plan()?, batches)?;
        stock.room(batches * N);
        let work = Work { what, batches, rng: &mut self.rng, pool: self.pool.as_deref(), stock };
        channel.step("triples", |channel| match &self.keys {
            Keys::Client(key) => client(channel, key, work),
            Keys::Server(key) => server(channel, key, work),
        })
    }
}

impl TripleSupply for EncryptedTriples {
    fn triples(&mut self, channel: &mut Channel, n: usize) -> Result<Triples> {
        self.fill(channel, Correlation::Triple, n)?;
        let [a, b, c] = self.triples.take(n).try_into().expect("a stock of triples has three columns");
        Ok(Triples { a, b, c })
    }
}

/// Batches of each message.
fn messages(batches: usize) -> Vec<usize> {
    (0..batches).step_by(BATCHES_A_MESSAGE).map(|first| BATCHES_A_MESSAGE.min(batches - first)).collect()
}

/// The client's random polynomials of one batch: a and b, or a.
type Plains = Vec<Zeroizing<Vec<u64>>>;

/// What is to be made, and with what.
struct Work<'a> {
    what: Correlation,
    batches: usize,
    rng: &'a mut SecretRng,
    pool: Option<&'a ThreadPool>,
    stock: &'a mut Stock,
}

/// Runs work that does not wait for the peer, on the threads of the pool if there is one.
fn inside<T: Send>(pool: Option<&ThreadPool>, work: impl FnOnce() -> T + Send) -> T {
    match pool {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

fn client(channel: &mut Channel, key: &SecretKey, work: Work) -> Result<()> {
    let Work { what, batches, rng, pool, stock } = work;
    let plan = what.answer_plan()?;
    let length = plan.answer_len(N);
    let messages = messages(batches);
    let mut waiting: std::collections::VecDeque<Vec<Plains>> = Default::default();
    let mut asked = messages.iter();
    for (now, &count) in messages.iter().enumerate() {
        // One message ahead, so that neither party waits while the other works.
        for &count in asked.by_ref().take(if now == 0 { 2 } else { 1 }) {
            let forks: Vec<_> = (0..count).map(|_| rng.fork()).collect();
            let make = || forks.into_par_iter().map(|rng| ask(key, rng, what)).collect::<Vec<_>>();
            let made = inside(pool, make);
            let (bytes, plains): (Vec<_>, Vec<_>) = made.into_iter().unzip();
            channel.send(Kind::Request, &bytes.concat())?;
            channel.flush()?;
            waiting.push_back(plains);
        }
        let body = channel.receive(Kind::Answer, count * length)?;
        let plains = waiting.pop_front().expect("a request was made for every answer");
        let open = |(bytes, plains): (&[u8], Plains)| -> Result<Plains> {
            let product = Zeroizing::new(key.open_slots(&Answer::from_bytes(bytes, &plan, N)?, &plan)?);
            Ok(assemble(plains, &product))
        };
        let all = || body.par_chunks_exact(length).zip(plains).map(open).collect::<Result<Vec<_>>>();
        let opened = inside(pool, all);
        let opened = opened.map_err(|_| channel.refuse("an answer is not one of this plan"))?;
        opened.iter().for_each(|batch| stock.put(batch));
    }
    Ok(())
}

/// The requests of one batch and what they encrypt.
fn ask(key: &SecretKey, mut rng: SecretRng, what: Correlation) -> (Vec<u8>, Plains) {
    let mut bytes = Vec::with_capacity(what.requests() * short::WIRE_LEN);
    let plains = (0..what.requests())
        .map(|_| {
            let mut plain = Zeroizing::new(field::random_vector(&mut rng, N));
            bytes.extend(short::shorten(key.encrypt(LEVELS, &plain, &mut rng), &mut plain));
            plain
        })
        .collect();
    (bytes, plains)
}

/// A party's shares in slots: its own a and b (or a), and their product plus its share of the cross terms, all given as polynomials.
fn assemble(plains: Plains, product: &[u64]) -> Plains {
    let mut out: Plains = plains.iter().map(|plain| Zeroizing::new(slots::decode(plain))).collect();
    let mut c = Zeroizing::new(slots::decode(product));
    let (a, b) = (&out[0], &out[out.len() - 1]);
    for ((c, &a), &b) in c.iter_mut().zip(a.iter()).zip(b.iter()) {
        *c = field::add(*c, field::mul(a, b));
    }
    out.push(c);
    out
}

fn server(channel: &mut Channel, key: &PublicKey, work: Work) -> Result<()> {
    let Work { what, batches, rng, pool, stock } = work;
    let plan = what.answer_plan()?;
    let length = what.requests() * short::WIRE_LEN;
    let seed = key.request_seed();
    for count in messages(batches) {
        let body = channel.receive(Kind::Request, count * length)?;
        let decode = |bytes: &[u8]| -> Result<Vec<Ciphertext>> {
            bytes.chunks_exact(short::WIRE_LEN).map(|bytes| short::expand(bytes, &seed)).collect()
        };
        let all = || body.par_chunks_exact(length).map(decode).collect::<Result<Vec<_>>>();
        let decoded = inside(pool, all);
        let decoded = decoded.map_err(|_| channel.refuse("a request is not a short ciphertext"))?;
        let jobs: Vec<_> = decoded.into_iter().map(|requests| (requests, rng.fork())).collect();
        let answer = |(requests, mut rng): (Vec<Ciphertext>, SecretRng)| -> Result<(Vec<u8>, Plains)> {
            let plains: Plains =
                (0..what.requests()).map(|_| Zeroizing::new(field::random_vector(&mut rng, N))).collect();
            let mut product = cross_terms(&requests, &plains);
            let zero = key.encrypt_zero(LEVELS, &mut rng);
            let (masked, share) = finish_slots(&mut product, zero, &plan, &mut rng)?;
            let share = Zeroizing::new(share);
            Ok((masked.to_bytes(&plan), assemble(plains, &share)))
        };
        let done = inside(pool, || jobs.into_par_iter().map(answer).collect::<Result<Vec<_>>>());
        let (bytes, made): (Vec<_>, Vec<_>) = done?.into_iter().unzip();
        channel.send(Kind::Answer, &bytes.concat())?;
        channel.flush()?;
        made.iter().for_each(|batch| stock.put(batch));
    }
    Ok(())
}

/// a0 b1 + b0 a1, or 2 a0 a1.
fn cross_terms(requests: &[Ciphertext], plains: &Plains) -> Ciphertext {
    let mut sum = Ciphertext::zero(LEVELS);
    if let [a, b] = requests {
        sum.add_product(a, &plains[1]);
        sum.add_product(b, &plains[0]);
    } else {
        let twice: Zeroizing<Vec<u64>> = Zeroizing::new(plains[0].iter().map(|&x| field::add(x, x)).collect());
        sum.add_product(&requests[0], &twice);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::{BatchedPlan, BatchedShape, Conditions};
    use crate::net::memory;
    use std::collections::HashSet;

    fn supplies() -> (EncryptedTriples, EncryptedTriples) {
        let mut rng = SecretRng::from_os();
        let secret = SecretKey::generate(&mut rng);
        let public = secret.public_key(&[2; 32], &mut rng);
        (EncryptedTriples::client(Arc::new(secret)), EncryptedTriples::server(Arc::new(public)))
    }

    /// Runs the same calls at both parties; returns their results and the client's costs.
    fn run<T: Send>(
        call: impl Fn(&mut EncryptedTriples, &mut Channel) -> T + Sync,
    ) -> (T, T, Vec<crate::net::StepCost>) {
        let (mut mine, mut other) = supplies();
        let (mut c, mut s) = memory::channels();
        std::thread::scope(|scope| {
            let call = &call;
            let server = scope.spawn(move || call(&mut other, &mut s));
            let client = call(&mut mine, &mut c);
            let costs = c.costs();
            (client, server.join().unwrap(), costs)
        })
    }

    fn opened(c: &[u64], s: &[u64]) -> Vec<u64> {
        c.iter().zip(s).map(|(&a, &b)| field::add(a, b)).collect()
    }

    #[test]
    fn triples_multiply_and_none_is_given_out_twice() {
        let counts = [1, 8191, 1, 9000, 0, 7383];
        let (c, s, _) = run(|supply, channel| {
            let out: Vec<Triples> = counts.iter().map(|&n| supply.triples(channel, n).unwrap()).collect();
            assert_eq!(supply.stock(), 0, "8192 and 16384 were made, and all given out");
            out
        });
        let mut seen = HashSet::new();
        for ((c, s), &n) in c.iter().zip(&s).zip(&counts) {
            assert_eq!((c.a.len(), c.b.len(), c.c.len(), s.a.len()), (n, n, n, n));
            let (a, b, product) = (opened(&c.a, &s.a), opened(&c.b, &s.b), opened(&c.c, &s.c));
            for i in 0..n {
                assert_eq!(product[i], field::mul(a[i], b[i]));
                assert!(seen.insert((c.a[i], c.b[i])) && seen.insert((s.a[i], s.b[i])), "a triple came twice");
            }
        }
    }

    #[test]
    fn both_parties_may_work_on_one_thread_of_one_pool() {
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let (mine, other) = supplies();
        let (mut mine, mut other) = (mine.with_pool(pool.clone()), other.with_pool(pool));
        let (mut c, mut s) = memory::channels();
        let (c, s) = std::thread::scope(|scope| {
            let server = scope.spawn(move || other.triples(&mut s, 9000).unwrap());
            (mine.triples(&mut c, 9000).unwrap(), server.join().unwrap())
        });
        let (a, b, product) = (opened(&c.a, &s.a), opened(&c.b, &s.b), opened(&c.c, &s.c));
        assert!((0..9000).all(|i| product[i] == field::mul(a[i], b[i])));
    }

    #[test]
    fn a_growing_stock_is_moved_once_a_call_and_what_is_taken_is_wiped() {
        let mut stock = Stock(vec![vec![]; 2]);
        for round in 1..4 {
            stock.room(3 * N);
            let place = stock.0[0].as_ptr();
            for _ in 0..3 {
                stock.put(&[Zeroizing::new(vec![round; N]), Zeroizing::new(vec![round; N])]);
            }
            assert_eq!(stock.0[0].as_ptr(), place);
            assert_eq!(stock.take(N), [vec![round; N], vec![round; N]]);
        }
        assert_eq!(stock.len(), 6 * N);
    }

    #[test]
    fn squares_are_squares() {
        let (c, s, _) = run(|supply, channel| supply.squares(channel, 10_000).unwrap());
        let (a, product) = (opened(&c.a, &s.a), opened(&c.c, &s.c));
        assert!(a.iter().zip(&product).all(|(&a, &c)| c == field::mul(a, a)));
    }

    #[test]
    fn refilling_ahead_costs_what_is_stated_and_drawing_costs_nothing() {
        let (_, _, costs) = run(|supply, channel| {
            supply.refill(channel, 5 * N).unwrap();
            let before = channel.costs();
            supply.triples(channel, 5 * N).unwrap();
            assert_eq!(before.last().unwrap().bytes_sent, channel.costs().last().unwrap().bytes_sent);
        });
        let cost = costs.iter().find(|cost| cost.step == "triples").unwrap();
        let each = (cost.bytes_sent + cost.bytes_received) as f64 / (5 * N) as f64;
        assert!(each < 39.3, "{each} bytes a triple");
    }

    #[test]
    fn a_supply_whose_session_has_used_up_its_hiding_makes_no_more() {
        let (c, s, _) = run(|supply, channel| {
            let plan = Correlation::Triple.answer_plan().unwrap();
            supply.keys.budget().leave(&plan, 2);
            supply.refill(channel, 2 * N).unwrap();
            supply.triples(channel, 2 * N).unwrap();
            supply.triples(channel, 1).map(drop).unwrap_err().code()
        });
        assert_eq!([c, s], ["engine.hiding_used_up"; 2]);
    }

    /// What a session's hiding lasts for: prompts of 2048 token slots through DeepSeekMoE's 27 layers, the products of the
    /// experts and the triples of their activations.
    #[test]
    fn a_session_answers_two_large_prompts() {
        let layer = |columns_in, columns_out: &[usize]| BatchedShape {
            experts: 64,
            tokens: 32,
            columns_in,
            columns_out: columns_out.to_vec(),
        };
        let first = BatchedPlan::new(layer(2048, &[1408, 1408]), Conditions::LAN).unwrap();
        let rest = 350_000_000 - first.request_bytes() - first.answer_bytes();
        let second = BatchedPlan::within(layer(1408, &[2048]), Conditions::LAN, rest).unwrap();
        let part = |plan: &AnswerPlan, answers: usize| {
            answers as f64 * plan.hiding_cost() as f64 / f64::from(HidingBudget::WHOLE_LOG2).exp2()
        };
        let products = part(first.answer(), first.answers()) + part(second.answer(), second.answers());
        let triple = Correlation::Triple.answer_plan().unwrap();
        let triples = part(&triple, 3 * 64 * 32 * 1408 / N);
        println!("a layer: 1/{:.0} for products, 1/{:.0} for triples", 1.0 / products, 1.0 / triples);
        assert!(2.0 * 27.0 * (products + triples) < 1.0);
    }

    #[test]
    fn a_peer_that_sends_rubbish_gets_a_typed_error() {
        for (length, expected) in [(2 * short::WIRE_LEN, true), (2 * short::WIRE_LEN - 1, false), (0, false)] {
            let (_, mut supply) = supplies();
            let (mut c, mut s) = memory::channels();
            c.send(Kind::Request, &vec![0xa5; length]).unwrap();
            // Any bytes of the right length are ciphertexts; the answer to them helps nobody.
            assert_eq!(supply.refill(&mut s, 1).is_ok(), expected);
            assert!(expected || matches!(supply.refill(&mut s, 1), Err(Error::SessionOver)));
        }
        let (mut supply, _) = supplies();
        let (mut c, mut s) = memory::channels();
        s.send(Kind::Answer, &[0; 10]).unwrap();
        assert!(matches!(supply.refill(&mut c, 1), Err(Error::BadMessage { .. })));
        assert!(matches!(supply.refill(&mut c, MOST + 1), Err(Error::Unsupported(_))));
    }
}
