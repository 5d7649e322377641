//! Seconds and bytes of products with one shared weight, both parties on this machine: `cargo run --release --example single_product`.
//!
//! Arguments: rows, columns, outputs, bits of a weight; by default 24 2048 1408 16.

use cloister_core::field;
use cloister_core::matmul::Encryption;
use cloister_core::matmul::single::{self, CostModel, Matrix, Plan, Shape};
use cloister_core::matmul::triples::EncryptedTriples;
use cloister_core::net::{Channel, memory};
use cloister_core::ot::{Block, OtSupply, ReceivedPads, ReceivedPads16};
use cloister_core::party::{Party, Role, TripleSupply, Triples};
use cloister_core::random::SecretRng;
use cloister_core::{Error, Result};
use std::time::Instant;

/// A product needs no correlations.
struct NoSupply;

impl OtSupply for NoSupply {
    fn send(&mut self, _: &mut Channel, _: usize) -> Result<Vec<[Block; 2]>> {
        Err(Error::Exhausted("this example has no transfers".into()))
    }
    fn receive(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads> {
        Err(Error::Exhausted("this example has no transfers".into()))
    }
    fn send16(&mut self, _: &mut Channel, _: usize) -> Result<Vec<[u8; 16]>> {
        Err(Error::Exhausted("this example has no transfers".into()))
    }
    fn receive16(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads16> {
        Err(Error::Exhausted("this example has no transfers".into()))
    }
}

impl TripleSupply for NoSupply {
    fn triples(&mut self, _: &mut Channel, _: usize) -> Result<Triples> {
        Err(Error::Exhausted("this example has no triples".into()))
    }
}

fn party(role: Role, channel: Channel) -> Party {
    Party { role, channel, ot: Box::new(NoSupply), triples: Box::new(NoSupply), rng: SecretRng::from_os() }
}

/// Runs both sides, each on a thread, and prints the time from the first byte to the last share.
fn both<T: Send, U: Send>(name: &str, client: impl FnOnce() -> T + Send, server: impl FnOnce() -> U + Send) -> (T, U) {
    let start = Instant::now();
    let out = std::thread::scope(|scope| {
        let server = scope.spawn(server);
        (client(), server.join().expect("the server ends"))
    });
    println!("{name:<28} {:>8.1} ms", start.elapsed().as_secs_f64() * 1e3);
    out
}

fn main() -> Result<()> {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let take = |i: usize, default: usize| given.get(i).copied().unwrap_or(default);
    let shape = Shape { rows: take(0, 24), columns: take(1, 2048), outputs: take(2, 1408) };
    let bits = take(3, 16) as u32;
    let plan = Plan::new(shape, bits, &CostModel::default())?;
    println!("{plan:?}");
    println!("{} request and {} answer ciphertexts", plan.tiles() * plan.inputs(), plan.tiles() * plan.answers());

    let mut rng = SecretRng::from_insecure_fixed_seed(7);
    let x = [0, 1].map(|_| field::random_vector(&mut rng, shape.rows * shape.columns));
    let weights: Vec<i32> = (0..shape.columns * shape.outputs).map(|_| rng.next_u64() as i32 >> (32 - bits)).collect();
    let weights = Matrix::from_i32(shape.columns, shape.outputs, bits, &weights)?;
    let (c, s) = memory::channels();
    let (mut c, mut s) = (party(Role::Client, c), party(Role::Server, s));

    let (mine, other) = both(
        "keys",
        || Encryption::exchange(&mut c, &[0; 32], &[], 2),
        || Encryption::exchange(&mut s, &[0; 32], &[], 2),
    );
    let (mine, other) = (mine?, other?);
    for round in ["product, first time", "product", "product"] {
        c.channel.reset_costs();
        s.channel.reset_costs();
        let (a, b) = both(
            round,
            || single::multiply(&mut c, &mine, &plan, &x[0], None),
            || single::multiply(&mut s, &other, &plan, &x[1], Some(weights)),
        );
        a?;
        b?;
    }
    for (who, channel) in [("client", &mut c.channel), ("server", &mut s.channel)] {
        for cost in channel.costs().iter().filter(|cost| cost.step.contains('/')) {
            let label = format!("  {who}, {}", cost.step);
            let megabytes = mb(cost.bytes_sent + cost.bytes_received);
            println!("{label:<28} {:>8.1} ms (waiting included), {megabytes:.2} MB", cost.seconds * 1e3);
        }
    }

    let (prepared, kept) = both(
        "prepared ahead",
        || single::prepare(&mut c, &mine, &plan, None),
        || single::prepare(&mut s, &other, &plan, Some(weights)),
    );
    c.channel.reset_costs();
    let (prepared, kept) = (prepared?, kept?);
    let (a, b) = both(
        "online after that",
        || single::online(&mut c, &mine, prepared, &x[0], None),
        || single::online(&mut s, &other, kept, &x[1], Some(weights)),
    );
    a?;
    b?;
    let sent = c.channel.costs().iter().map(|cost| cost.bytes_sent).sum();
    println!("{:<28} {:>8.2} MB up", "on the wire, online", mb(sent));

    let (Encryption::Client(mine), Encryption::Server(other)) = (mine, other) else { unreachable!("by the roles") };
    let (mut mine, mut other) = (EncryptedTriples::client(mine.secret), EncryptedTriples::server(other.public));
    let count = 24 * 8192;
    let start = Instant::now();
    let (a, b) = both("196,608 triples", || mine.refill(&mut c.channel, count), || other.refill(&mut s.channel, count));
    a?;
    b?;
    println!("{:<28} {:>8.0} a second", "", count as f64 / start.elapsed().as_secs_f64());
    Ok(())
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
