//! How long a party waits: the usual limit, and during a long product as long again as its public plan says.

use cloister_core::engine::{Engine, Security, Settings};
use cloister_core::matmul::{BatchedShape, ExpertWeights, Numbers, single::Shape};
use cloister_core::net::{Limits, Pipe, memory};
use cloister_core::session::Network;
use cloister_core::{Result, Role};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Writes down every limit that is set.
struct Watched<P>(P, Arc<Mutex<Vec<Duration>>>);

impl<P: Pipe> Pipe for Watched<P> {
    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.send(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<()> {
        self.0.receive(into)
    }

    fn set_quiet_limit(&mut self, limit: Duration) {
        self.1.lock().unwrap().push(limit);
        self.0.set_quiet_limit(limit);
    }
}

/// The limits that one party sets during a session on such a link: after the hello, then around each product.
fn limits(bytes_per_second: u64) -> Vec<Duration> {
    let (a, b) = memory::pipes(Duration::from_secs(20));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watched = Watched(a, seen.clone());
    let run = |role: Role, pipe: Box<dyn Pipe>| -> Result<()> {
        let mut settings = Settings::new(Security::InsecureLoopback);
        (settings.threads, settings.limits.quiet) = (1, Duration::from_secs(7));
        settings.terms.network = Network { bytes_per_second, ..Network::DEFAULT };
        let mut engine = Engine::set_up(role, pipe, settings)?;
        let server = role == Role::Server;
        let shape = BatchedShape { experts: 16, tokens: 32, columns_in: 4, columns_out: vec![4] };
        let weights = vec![1i16; 16 * 4 * 4];
        let matrices = [ExpertWeights::new(Numbers::I16(&weights), 16, 4, 4)?];
        engine.batched_product(&vec![1; shape.inputs()], shape, None, server.then_some(&matrices), None)?;
        let shape = Shape { rows: 2, columns: 8, outputs: 8 };
        engine.product(&[1; 16], shape, 16, server.then_some(&[1; 64]), None)?;
        // A caller's mistake inside a product leaves the usual limit behind too.
        assert!(engine.product(&[u64::MAX; 16], shape, 16, server.then_some(&[1; 64]), None).is_err());
        engine.finish()
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| run(Role::Server, Box::new(b)));
        run(Role::Client, Box::new(watched)).unwrap();
        server.join().unwrap().unwrap();
    });
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen[..2], [Limits::default().hello, Duration::from_secs(7)]);
    seen[2..].to_vec()
}

#[test]
fn a_long_product_is_given_the_time_that_its_plan_expects_and_no_other_step_is() {
    let usual = Duration::from_secs(7);
    let (fast, slow) = (limits(1_000_000_000), limits(10_000));
    assert_eq!((fast.len(), slow.len()), (6, 6));
    for (k, (fast, slow)) in fast.iter().zip(&slow).enumerate() {
        // A peer that claims a slow link cannot make us wait longer for it.
        assert_eq!(fast, slow);
        if k % 2 == 1 {
            assert_eq!(*fast, usual);
        } else {
            assert!(usual < *fast && *fast < usual + Duration::from_secs(10), "{fast:?}");
        }
    }
}
