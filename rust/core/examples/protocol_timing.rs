//! Seconds, bytes and rounds of the steps that carry a layer, both parties as threads of this process. "online": the
//! correlations come from a dealer before the clock starts. "total": they are extended while the clock runs, after a
//! set-up that is not counted.
//!
//! `cargo run --release -p cloister-core --features insecure-test-dealer --example protocol_timing`

use cloister_core::net::Channel;
use cloister_core::ot::{
    BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind, OtSupply, ReceivedPads, ReceivedPads16, SentPads,
};
use cloister_core::protocol::{Link, Rows, dispatch_ranks, is_negative, less_than, select, top_k_mask, truncate};
use cloister_core::random::SecretRng;
use cloister_core::testing::{parties, share};
use cloister_core::{Party, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// One call to a supply: what it gave, or will give.
enum Call {
    Sent(SentPads),
    Received(ReceivedPads),
    Sent16(Vec<[u8; 16]>),
    Received16(ReceivedPads16),
}

type Calls = Arc<Mutex<VecDeque<Call>>>;

/// Remembers what kind of call was made and for how many.
struct Recording(Box<dyn OtSupply>, Calls);

/// Gives what was made before.
struct Stock(VecDeque<Call>);

impl Recording {
    fn note(&self, call: Call) {
        self.1.lock().expect("no thread panics").push_back(call);
    }
}

fn empty_received(n: usize) -> ReceivedPads {
    ReceivedPads { choices: vec![0; n], pads: Vec::new() }
}

impl OtSupply for Recording {
    fn send(&mut self, channel: &mut Channel, n: usize) -> Result<SentPads> {
        self.note(Call::Sent(vec![[0; 2]; n]));
        self.0.send(channel, n)
    }

    fn receive(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads> {
        self.note(Call::Received(empty_received(n)));
        self.0.receive(channel, n)
    }

    fn send16(&mut self, channel: &mut Channel, n: usize) -> Result<Vec<[u8; 16]>> {
        self.note(Call::Sent16(vec![[0; 16]; n]));
        self.0.send16(channel, n)
    }

    fn receive16(&mut self, channel: &mut Channel, n: usize) -> Result<ReceivedPads16> {
        self.note(Call::Received16(ReceivedPads16 { choices: vec![0; n], pads: Vec::new() }));
        self.0.receive16(channel, n)
    }
}

impl Stock {
    fn next(&mut self) -> Call {
        self.0.pop_front().expect("the second run asks for what the first one asked for")
    }
}

impl OtSupply for Stock {
    fn send(&mut self, _: &mut Channel, _: usize) -> Result<SentPads> {
        let Call::Sent(pads) = self.next() else { unreachable!("the order of calls is public") };
        Ok(pads)
    }

    fn receive(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads> {
        let Call::Received(pads) = self.next() else { unreachable!("the order of calls is public") };
        Ok(pads)
    }

    fn send16(&mut self, _: &mut Channel, _: usize) -> Result<Vec<[u8; 16]>> {
        let Call::Sent16(pads) = self.next() else { unreachable!("the order of calls is public") };
        Ok(pads)
    }

    fn receive16(&mut self, _: &mut Channel, _: usize) -> Result<ReceivedPads16> {
        let Call::Received16(pads) = self.next() else { unreachable!("the order of calls is public") };
        Ok(pads)
    }
}

/// Fills the recorded calls from a party's own supply, in the same order as its peer does.
fn stock(party: &mut Party, calls: &Calls) -> (VecDeque<Call>, usize, usize) {
    let recorded = std::mem::take(&mut *calls.lock().expect("no thread panics"));
    let (mut transfers, mut transfers16) = (0, 0);
    let (ot, channel) = (&mut party.ot, &mut party.channel);
    let filled = recorded
        .into_iter()
        .map(|call| {
            match &call {
                Call::Sent(v) => transfers += v.len(),
                Call::Received(v) => transfers += v.choices.len(),
                Call::Sent16(v) => transfers16 += v.len(),
                Call::Received16(v) => transfers16 += v.choices.len(),
            }
            match call {
                Call::Sent(v) => ot.send(channel, v.len()).map(Call::Sent),
                Call::Received(v) => ot.receive(channel, v.choices.len()).map(Call::Received),
                Call::Sent16(v) => ot.send16(channel, v.len()).map(Call::Sent16),
                Call::Received16(v) => ot.receive16(channel, v.choices.len()).map(Call::Received16),
            }
            .expect("a dealer gives")
        })
        .collect();
    (filled, transfers, transfers16)
}

/// Seconds by the clock and on processors.
struct Seconds {
    wall: f64,
    processor: f64,
}

/// Processor seconds of this process so far, all threads, in steps of 10 ms (Linux; 0 elsewhere).
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let ticks = |field: usize| after_name.split_whitespace().nth(field).and_then(|v| v.parse::<f64>().ok());
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

/// Runs both parties on threads.
fn both(client: &mut Party, server: &mut Party, step: impl Fn(&mut Party) + Sync) -> Seconds {
    let (start, used) = (Instant::now(), processor_seconds());
    std::thread::scope(|scope| {
        scope.spawn(|| step(server));
        step(client);
    });
    Seconds { wall: start.elapsed().as_secs_f64(), processor: processor_seconds() - used }
}

fn time(name: &str, elements: usize, values: &[i64], step: impl Fn(&mut Party, &[u64]) -> Result<()> + Sync) {
    let (a, b) = share(values);
    let run = |party: &mut Party| {
        let x = if party.role.is_client() { &a } else { &b };
        step(party, x).expect("both parties are honest");
    };
    let (mut client, mut server) = parties();
    let calls = [Calls::default(), Calls::default()];
    client.ot = Box::new(Recording(client.ot, calls[0].clone()));
    server.ot = Box::new(Recording(server.ot, calls[1].clone()));
    both(&mut client, &mut server, run);

    let (mut client, mut server) = parties();
    let (client_stock, transfers, transfers16) = stock(&mut client, &calls[0]);
    let (server_stock, ..) = stock(&mut server, &calls[1]);
    client.ot = Box::new(Stock(client_stock));
    server.ot = Box::new(Stock(server_stock));
    let seconds = both(&mut client, &mut server, run);

    report(name, "online", seconds, &mut client, elements);
    let each = |n: usize| n as f64 / elements as f64;
    println!("{:<42} {:.1} transfers 1-of-2 and {:.1} 1-of-16 each", "", each(transfers), each(transfers16));

    let (mut client, mut server) = parties();
    both(&mut client, &mut server, |party| {
        let group = GroupBits::new(4).expect("4 is one of the group sizes");
        let config = OtConfig { base: BaseKind::Ristretto, kind: OtKind::SoftSpoken(group) };
        let supply = ExtendedOt::set_up(&mut party.channel, party.role, &[1; 32], config, &mut SecretRng::from_os());
        party.ot = Box::new(supply.expect("both parties are honest"));
        party.channel.reset_costs();
    });
    let seconds = both(&mut client, &mut server, run);
    report(name, "total", seconds, &mut client, elements);
}

fn report(name: &str, which: &str, seconds: Seconds, client: &mut Party, elements: usize) {
    let costs = client.channel.costs();
    let bytes: u64 = costs.iter().map(|s| s.bytes_sent + s.bytes_received).sum();
    let rounds: u64 = costs.iter().map(|s| s.rounds).sum();
    println!(
        "{name:<42} {which:<6} {:>7.3} s, {:>5.2} s on processors {:>8.2} MB {:>7.1} B each {rounds:>3} rounds",
        seconds.wall,
        seconds.processor,
        bytes as f64 / 1e6,
        bytes as f64 / elements as f64,
    );
}

fn main() {
    let mut rng = SecretRng::from_insecure_fixed_seed(1);
    let mut values = |n: usize, bits: u32| -> Vec<i64> {
        (0..n).map(|_| (rng.next_u64() & ((1 << bits) - 1)) as i64 - (1 << (bits - 1))).collect()
    };
    let n = 1 << 18;
    time("less_than, 41 bits, 2^18", n, &values(n, 38), |p, x| less_than(p, x, &vec![0; x.len()], 41, 0).map(drop));
    time("sign of 17 bits, 2^18", n, &values(n, 16), |p, x| is_negative(p, x, 17, 0).map(drop));
    time("sign of 17 bits, 2^20", 4 * n, &values(4 * n, 16), |p, x| is_negative(p, x, 17, 0).map(drop));
    time("truncation, 2^18", n, &values(n, 38), |p, x| truncate(p, x, 12).map(drop));
    time("selection, 2^18", n, &values(n, 38), |p, x| select(p, &vec![1; x.len()], x).map(drop));
    let gate = Rows { length: 64, kappa: 17, drop_bits: 0 };
    time("top 6 of 64, 128 rows", 128 * 64, &values(128 * 64, 15), |p, x| {
        top_k_mask(p, x, gate, 6, &Link::LAN).map(drop)
    });
    let tokens = Rows { length: 128, kappa: 17, drop_bits: 0 };
    time("dispatch ranks, top 24 of 128, 64 experts", 64 * 128, &values(64 * 128, 15), |p, x| {
        dispatch_ranks(p, x, tokens, 24, &Link::LAN).map(drop)
    });
}
