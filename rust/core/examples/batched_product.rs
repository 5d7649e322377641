//! The expert products of one mixture-of-experts layer, both parties in this process over a memory channel: seconds of each
//! phase and party, bytes, and the kernel against the machine's peak.
//!
//! `cargo run --release --example batched_product -- [experts] [tokens] [hidden] [inner] [layout] [layout]`, by default the
//! DeepSeekMoE layer: 64 experts, 32 token slots, 2048 -> 1408 twice on one input and 1408 -> 2048. The layouts of the two
//! products are `auto`, or `rotated`, `copied` or `partial` for what the columns of a ciphertext beyond its rows are.

use cloister_core::matmul::batched::multiply;
use cloister_core::matmul::layout::{Layout, RowUse};
use cloister_core::matmul::{
    BatchedPlan, BatchedShape, Conditions, Encryption, ExpertWeights, Numbers, Phase, multiply_add_rate,
};
use cloister_core::net::{Channel, memory};
use cloister_core::ot::{OtSupply, ReceivedPads, ReceivedPads16, SentPads};
use cloister_core::party::{TripleSupply, Triples};
use cloister_core::random::SecretRng;
use cloister_core::{Error, Party, Result, Role, field};
use std::time::{Duration, Instant};

/// The products need no oblivious transfer and no triples.
struct Nothing;

fn none<T>() -> Result<T> {
    Err(Error::Exhausted("this example has none".into()))
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

fn party(role: Role, pipe: memory::MemoryPipe) -> Party {
    let channel = Channel::new(Box::new(pipe));
    Party { role, channel, ot: Box::new(Nothing), triples: Box::new(Nothing), rng: SecretRng::from_os() }
}

/// Bytes that the automatic plans of both products may take together, scaled from 350 MB for the DeepSeekMoE layer.
fn budget(experts: usize, tokens: usize, hidden: usize, inner: usize) -> usize {
    (350e6 * (experts * tokens * (hidden + inner)) as f64 / (64 * 32 * (2048 + 1408)) as f64) as usize
}

fn plan(shape: BatchedShape, choice: &str, most_bytes: usize) -> Result<BatchedPlan> {
    let tokens = shape.tokens.next_power_of_two();
    let experts = shape.experts.next_power_of_two();
    let degree = 8192;
    let blocks = (degree / 2 / tokens / experts).max(1);
    let pick = |name| if choice == name { blocks } else { 1 };
    let (rotated, copied, partial) = (pick("rotated"), pick("copied"), pick("partial"));
    match choice {
        "auto" => BatchedPlan::within(shape, Conditions::LAN, most_bytes),
        _ => BatchedPlan::with_layout(
            shape,
            Layout { degree, tokens, experts, rows: RowUse::Rotated, rotated, copied, partial },
        ),
    }
}

/// What one party saw: seconds of keys and of products, bytes sent, seconds of each phase, and its shares.
struct Seen {
    keys: f64,
    products: f64,
    sent: u64,
    phases: Vec<(Phase, f64)>,
    shares: Vec<Vec<u64>>,
}

fn run(mut party: Party, plans: &[BatchedPlan], inputs: &[Vec<u64>], weights: &[Vec<Vec<i16>>]) -> Result<Seen> {
    let automorphisms: Vec<_> = plans.iter().flat_map(BatchedPlan::automorphisms).collect();
    let begun = Instant::now();
    let encryption = Encryption::exchange(&mut party, &[0; 32], &automorphisms, 2)?;
    let keys = begun.elapsed().as_secs_f64();
    let before: u64 = party.channel.costs().iter().map(|c| c.bytes_sent).sum();
    let begun = Instant::now();
    let mut shares = Vec::new();
    for ((plan, input), weights) in plans.iter().zip(inputs).zip(weights) {
        let shape = plan.shape();
        let matrices: Result<Vec<ExpertWeights>> = weights
            .iter()
            .zip(&shape.columns_out)
            .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in))
            .collect();
        let matrices = matrices?;
        let mine = (party.role == Role::Server).then_some(&matrices[..]);
        shares.extend(multiply(&mut party, &encryption, plan, input, mine)?);
    }
    Ok(Seen {
        keys,
        products: begun.elapsed().as_secs_f64(),
        sent: party.channel.costs().iter().map(|c| c.bytes_sent).sum::<u64>() - before,
        phases: Phase::ALL.map(|phase| (phase, encryption.work().seconds(phase))).to_vec(),
        shares,
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |k: usize, default| arguments.get(k).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (experts, tokens, hidden, inner) = (number(0, 64), number(1, 32), number(2, 2048), number(3, 1408));
    let choice = |k: usize| arguments.get(k).map_or("auto", String::as_str);
    let shape = |columns_in, columns_out: &[usize]| BatchedShape {
        experts,
        tokens,
        columns_in,
        columns_out: columns_out.to_vec(),
    };
    let most = budget(experts, tokens, hidden, inner);
    let first = plan(shape(hidden, &[inner, inner]), choice(4), most)?;
    let rest = most.saturating_sub(first.request_bytes() + first.answer_bytes());
    let plans = [first, plan(shape(inner, &[hidden]), choice(5), rest)?];
    for plan in &plans {
        println!("{:?}", plan.shape());
        println!("  {:?}", plan.layout());
        println!(
            "  {} requests, {} products, {} rotations, {} answers; {:.1} MB up, {:.1} MB down",
            plan.requests(),
            plan.products(),
            plan.rotations(),
            plan.answers(),
            plan.request_bytes() as f64 / 1e6,
            plan.answer_bytes() as f64 / 1e6
        );
    }

    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    let inputs: Vec<[Vec<u64>; 2]> =
        plans.iter().map(|p| [0, 1].map(|_| field::random_vector(&mut rng, p.shape().inputs()))).collect();
    let weights: Vec<Vec<Vec<i16>>> = plans
        .iter()
        .map(|p| {
            let s = p.shape();
            s.columns_out
                .iter()
                .map(|o| (0..experts * o * s.columns_in).map(|_| rng.next_u64() as i16).collect())
                .collect()
        })
        .collect();

    let (a, b) = memory::pipes(Duration::from_secs(600));
    let of = |k: usize| inputs.iter().map(|pair| pair[k].clone()).collect::<Vec<_>>();
    let (client_inputs, server_inputs) = (of(0), of(1));
    let (client, server) = std::thread::scope(|scope| {
        let (plans, weights) = (&plans, &weights);
        let other = scope.spawn(move || run(party(Role::Server, b), plans, &server_inputs, weights));
        let mine = run(party(Role::Client, a), plans, &client_inputs, weights);
        (mine, other.join().expect("the server's thread ends"))
    });
    let (client, server) = (client?, server?);

    // A sample of the outputs against plain integers modulo p.
    let mut output = 0;
    for ((plan, inputs), weights) in plans.iter().zip(&inputs).zip(&weights) {
        let s = plan.shape();
        for (matrix, &columns) in s.columns_out.iter().enumerate() {
            for k in (0..s.outputs(matrix)).step_by(s.outputs(matrix) / 50 + 1) {
                let (row, column) = (k / columns, k % columns);
                let weights = &weights[matrix][(row / s.tokens * columns + column) * s.columns_in..][..s.columns_in];
                let [x, y] = [0, 1].map(|i| &inputs[i][row * s.columns_in..][..s.columns_in]);
                let want = x.iter().zip(y).zip(weights).fold(0, |sum, ((&x, &y), &w)| {
                    field::add(sum, field::mul(field::add(x, y), field::from_signed(i64::from(w))))
                });
                assert_eq!(field::add(client.shares[output][k], server.shares[output][k]), want, "output {k}");
            }
            output += 1;
        }
    }

    let phases = client.phases.iter().zip(&server.phases).map(|(a, b)| (a.0, a.1 + b.1));
    println!("keys {:.2} s, products {:.2} s", client.keys.max(server.keys), client.products.max(server.products));
    println!("{:.1} MB up, {:.1} MB down", client.sent as f64 / 1e6, server.sent as f64 / 1e6);
    for (phase, seconds) in phases {
        println!("  {phase:?}: {seconds:.2} core-seconds");
        if phase == Phase::Kernel {
            let work: usize = plans.iter().map(BatchedPlan::kernel_multiplications).sum();
            let plain: usize = plans.iter().map(|p| p.shape().multiplications()).sum();
            println!("    {:.1} G multiply-adds a second and core", work as f64 / seconds / 1e9);
            println!("    {:.1} G in its inner loop alone, from the first-level cache", multiply_add_rate() / 1e9);
            println!("    {:.2} G multiply-accumulates of the plain product", plain as f64 / seconds / 1e9);
        }
    }
    Ok(())
}
