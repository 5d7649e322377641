//! What a batched product holds, by a counting allocator, against what its plan says: both parties in this process, over
//! sockets whose queues are short.

mod session_common;

use cloister_core::matmul::batched::multiply;
use cloister_core::matmul::{BatchedPlan, BatchedShape, Conditions, Encryption, ExpertWeights, Numbers};
use cloister_core::net::{Channel, Limits, Pipe, SocketPipe, tcp};
use cloister_core::ot::{OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use cloister_core::party::{TripleSupply, Triples};
use cloister_core::random::SecretRng;
use cloister_core::{Error, Party, Result, Role};
use session_common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn more(bytes: usize) {
    let now = NOW.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(now, Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; only counters are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    // `realloc` is the trait's own: a new piece, a copy, and the old piece freed, both counted while both are there.
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The products need no oblivious transfer and no triples.
struct Nothing;

fn none<T>() -> Result<T> {
    Err(Error::Exhausted("this test has none".into()))
}

impl OtSupply for Nothing {
    fn send(&mut self, _: &mut Channel, _: usize) -> Result<SentPads> {
        none()
    }
    fn receive(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads> {
        none()
    }
    fn send16(&mut self, _: &mut Channel, _: usize) -> Result<Vec<[u8; 16]>> {
        none()
    }
    fn receive16(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads16> {
        none()
    }
}

impl TripleSupply for Nothing {
    fn triples(&mut self, _: &mut Channel, _: usize) -> Result<Triples> {
        none()
    }
}

/// The queues of the link: what a direction holds at both ends.
const QUEUE: usize = 1 << 20;

/// A client that lets its server work for a while before it reads the first answer.
struct Late {
    pipe: SocketPipe,
    by: Duration,
}

impl Pipe for Late {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.pipe.send(bytes)
    }
    fn flush(&mut self) -> Result<()> {
        self.pipe.flush()
    }
    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        std::thread::sleep(std::mem::take(&mut self.by));
        self.pipe.receive(into)
    }
    fn receive_vec(&mut self, length: usize) -> Result<Vec<u8>> {
        self.pipe.receive_vec(length)
    }
}

fn parties(late: Duration) -> (Party, Party) {
    let limits = Limits { unread: QUEUE, unsent: QUEUE, ..Limits::default() };
    let (a, b) = sockets();
    let pipe = |stream| tcp::insecure_plain_loopback(stream, &limits).unwrap();
    let party = |role, pipe| Party {
        role,
        channel: Channel::new(pipe),
        ot: Box::new(Nothing),
        triples: Box::new(Nothing),
        rng: SecretRng::from_os(),
    };
    (party(Role::Client, Box::new(Late { pipe: pipe(a), by: late })), party(Role::Server, Box::new(pipe(b))))
}

/// The bytes that both parties held at most during one product, beside its arguments and the session's keys, if the client reads
/// its first answer so late.
fn held(plan: &BatchedPlan, threads: usize, late: Duration) -> usize {
    let shape = plan.shape();
    let share = vec![1u64; shape.inputs()];
    let weights: Vec<Vec<i16>> =
        shape.columns_out.iter().map(|&o| vec![3; shape.experts * o * shape.columns_in]).collect();
    let matrices: Vec<ExpertWeights> = weights
        .iter()
        .zip(&shape.columns_out)
        .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in).unwrap())
        .collect();
    let (mut client, mut server) = parties(late);
    let ready = Barrier::new(2);
    let begin = || {
        if ready.wait().is_leader() {
            MOST.store(NOW.load(Relaxed), Relaxed);
        }
        let before = NOW.load(Relaxed);
        ready.wait();
        before
    };
    let automorphisms = plan.automorphisms();
    let (before, results) = both(
        || {
            let encryption = Encryption::exchange(&mut client, &[5; 32], &automorphisms, threads).unwrap();
            let before = begin();
            let out = multiply(&mut client, &encryption, plan, &share, None).unwrap();
            (before, out)
        },
        || {
            let encryption = Encryption::exchange(&mut server, &[5; 32], &automorphisms, threads).unwrap();
            begin();
            multiply(&mut server, &encryption, plan, &share, Some(&matrices)).unwrap()
        },
    );
    let sum = cloister_core::field::add(before.1[0][0], results[0][0]);
    assert_eq!(sum, 6 * shape.columns_in as u64, "a product of twos and threes");
    MOST.load(Relaxed) - before.0
}

/// One test, because the counters are those of the whole process.
#[test]
fn no_product_holds_more_than_its_plan_says() {
    for (experts, tokens, columns_in, columns_out, threads, late) in [
        // Narrow tokens, which fill few lanes of the kernel.
        (64, 1, 512, vec![256], 1, 0),
        (3, 1, 2048, vec![300, 20], 2, 0),
        (64, 3, 100, vec![64], 2, 0),
        // The shapes of experts.
        (64, 32, 256, vec![96, 96], 2, 0),
        (8, 128, 200, vec![150], 1, 0),
        (300, 4, 10, vec![9], 2, 0),
        // Five times as many answers as may wait for a client that does not read.
        (64, 32, 20, vec![2000], 1, 6),
        // The longest rows and columns.
        (1, 4096, 16384, vec![1], 2, 0),
    ] {
        let shape = BatchedShape { experts, tokens, columns_in, columns_out };
        let plan = BatchedPlan::new(shape, Conditions::LAN).unwrap();
        let begun = std::time::Instant::now();
        let held = held(&plan, threads, Duration::from_secs(late));
        let [client, server] = [plan.client_memory(threads), plan.server_memory(threads)];
        let (said, mega) = (client + server, |bytes: usize| bytes as f64 / 1e6);
        println!(
            "{:?}, {threads} threads: {:.1} MB held, {:.1} + {:.1} MB said, {:?}\n    {:?}",
            plan.shape(),
            mega(held),
            mega(client),
            mega(server),
            begun.elapsed(),
            plan.layout()
        );
        assert!(held <= said + 8 * QUEUE, "{held} bytes held where {said} were said");
        assert!(said <= 3 * held + 8 * QUEUE, "{said} bytes said where {held} were held: no bound to plan with");
    }
}
