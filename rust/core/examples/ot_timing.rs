//! Times every kind of oblivious transfer: both parties in one process, each on one thread, over a memory pipe.
//!
//! Run with `cargo run --release --example ot_timing [transfers] [kind]`, the kind by the beginning of its name. For each
//! kind the table has the transfers per second of the pair (wall clock), each party's own time without waiting for the
//! other, and the bytes a transfer in both directions together.

use cloister_core::net::{Channel, memory};
use cloister_core::ot::{BaseKind, ExtendedOt, GroupBits, NOISE_TABLE, OtConfig, OtKind, OtSupply, distance_needed};
use cloister_core::random::SecretRng;
use cloister_core::{Result, Role};
use std::time::Instant;

/// Seconds and bytes of one party.
struct Cost {
    busy: f64,
    bytes: u64,
}

fn party(mut channel: Channel, role: Role, config: OtConfig, sixteen: bool, n: usize) -> Result<(Cost, Cost)> {
    let started = Instant::now();
    let mut supply = ExtendedOt::set_up(&mut channel, role, &[1; 32], config, &mut SecretRng::from_os())?;
    let sent = |channel: &mut Channel| channel.costs().iter().map(|s| s.bytes_sent).sum::<u64>();
    let setup = Cost { busy: started.elapsed().as_secs_f64(), bytes: sent(&mut channel) };
    let mut supply_some = |channel: &mut Channel, n: usize| -> Result<()> {
        match (role, sixteen) {
            (Role::Client, false) => supply.send(channel, n).map(drop),
            (Role::Server, false) => supply.receive(channel, n).map(drop),
            (Role::Client, true) => supply.send16(channel, n).map(drop),
            (Role::Server, true) => supply.receive16(channel, n).map(drop),
        }
    };
    supply_some(&mut channel, n)?;
    channel.reset_costs();
    let clock = thread_seconds();
    supply_some(&mut channel, n)?;
    Ok((setup, Cost { busy: thread_seconds() - clock, bytes: sent(&mut channel) }))
}

/// Processor seconds of this thread (Linux), so that waiting for the peer does not count.
fn thread_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|t| t.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1e-9
}

fn main() -> Result<()> {
    let n = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1 << 20);
    println!("silent batches: outputs, noise weight, tree depth, minimum distance needed for 128 bits");
    for line in NOISE_TABLE {
        let distance = distance_needed(line.noise_weight, 128.0);
        println!("  2^{:<3} {:>4} {:>3}   {distance:.4}", line.log_outputs, line.noise_weight, line.depth);
    }
    println!("{n} transfers; ns are processor time of each party's one thread");
    println!("kind              setup s   setup kB   M/s pair   sender ns   receiver ns   bytes each");
    let kinds = [1, 2, 4, 8].map(|k| (format!("softspoken {k}"), GroupBits::new(k).map(OtKind::SoftSpoken)));
    let wanted = std::env::args().nth(2).unwrap_or_default();
    let kinds = kinds.into_iter().chain([("silent".to_owned(), Ok(OtKind::Silent))]);
    for (name, kind) in kinds.filter(|(name, _)| name.starts_with(&wanted)) {
        for sixteen in [false, true] {
            let config = OtConfig { base: BaseKind::Ristretto, kind: kind.as_ref().map_or(OtKind::Silent, |&k| k) };
            let (a, b) = memory::channels();
            let (client, server, wall) = std::thread::scope(|scope| {
                let started = Instant::now();
                let other = scope.spawn(move || party(b, Role::Server, config, sixteen, n));
                let mine = party(a, Role::Client, config, sixteen, n);
                (mine, other.join(), started.elapsed().as_secs_f64())
            });
            let (setup, sender) = client?;
            let (setup_peer, receiver) = server.expect("the receiving thread does not panic")?;
            let label = format!("{name} {}", if sixteen { "1/16" } else { "1/2" });
            println!(
                "{label:<17} {:>7.3} {:>10.1} {:>10.2} {:>11.1} {:>13.1} {:>12.3}",
                setup.busy,
                (setup.bytes + setup_peer.bytes) as f64 / 1e3,
                2.0 * n as f64 / (wall - setup.busy) / 1e6,
                sender.busy * 1e9 / n as f64,
                receiver.busy * 1e9 / n as f64,
                (sender.bytes + receiver.bytes) as f64 / n as f64,
            );
        }
    }
    Ok(())
}
