//! Whole products over memory channels against plain integers.

use super::*;
use crate::matmul::layout::{Layout, RowUse};
use crate::matmul::plan::{BatchedShape, Conditions};
use crate::matmul::weights::Numbers;
use crate::net::{Limits, tcp};
use crate::party::Role;
use crate::rlwe::{self, PRIMES};
use crate::testing;
use std::time::Instant;

pub fn plain(shape: &BatchedShape, matrix: usize, x: &[i64], w: &[i16]) -> Vec<i64> {
    let (t, d, o) = (shape.tokens, shape.columns_in, shape.columns_out[matrix]);
    let mut out = Vec::new();
    for e in 0..shape.experts {
        for token in 0..t {
            for column in 0..o {
                let x = &x[(e * t + token) * d..][..d];
                let w = &w[(e * o + column) * d..][..d];
                out.push(x.iter().zip(w).map(|(&x, &w)| x * i64::from(w)).sum());
            }
        }
    }
    out
}

fn check(plan: &BatchedPlan) {
    let mut rng = SecretRng::from_insecure_fixed_seed(9);
    let shape = plan.shape().clone();
    let x: Vec<i64> = (0..shape.inputs()).map(|_| (rng.next_u64() % (1 << 20)) as i64 - (1 << 19)).collect();
    let weights: Vec<Vec<i16>> = shape
        .columns_out
        .iter()
        .map(|&o| (0..shape.experts * o * shape.columns_in).map(|_| rng.next_u64() as i16).collect())
        .collect();
    let (mine, theirs) = testing::share(&x);
    let keys = plan.automorphisms();
    let (client, server) = testing::run(
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &keys, 1)?;
            multiply(party, &encryption, plan, &mine, None)
        },
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &keys, 2)?;
            let matrices: Vec<ExpertWeights> = weights
                .iter()
                .zip(&shape.columns_out)
                .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in).unwrap())
                .collect();
            multiply(party, &encryption, plan, &theirs, Some(&matrices))
        },
    );
    let (client, server) = (client.unwrap(), server.unwrap());
    for matrix in 0..weights.len() {
        let got = testing::open(&client[matrix], &server[matrix]);
        assert_eq!(got, plain(&shape, matrix, &x, &weights[matrix]), "{:?}", plan.layout());
    }
}

#[test]
fn products_of_many_shapes_are_exact() {
    for (experts, tokens, columns_in, columns_out) in [
        (64, 32, 9, vec![5, 3]),
        (3, 1000, 5, vec![3]),
        (200, 30, 3, vec![2]),
        (64, 20, 6, vec![7]),
        (1, 4096, 3, vec![2]),
    ] {
        let shape = BatchedShape { experts, tokens, columns_in, columns_out };
        check(&BatchedPlan::new(shape, Conditions::LAN).unwrap());
    }
}

#[test]
fn every_layout_gives_the_same_product() {
    for (rows, rotated, copied, partial) in [
        (RowUse::Rotated, 2, 1, 1),
        (RowUse::Rotated, 1, 2, 1),
        (RowUse::Rotated, 1, 1, 2),
        (RowUse::Copied, 2, 1, 1),
        (RowUse::Partial, 2, 1, 1),
        (RowUse::Experts, 1, 2, 1),
    ] {
        let shape = BatchedShape { experts: 64, tokens: 30, columns_in: 10, columns_out: vec![6] };
        let layout = Layout { degree: N, tokens: 32, experts: 64, rows, rotated, copied, partial };
        check(&BatchedPlan::with_layout(shape, layout).unwrap());
    }
    for (rotated, copied, partial) in [(4, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let shape = BatchedShape { experts: 32, tokens: 30, columns_in: 10, columns_out: vec![12] };
        let layout = Layout { degree: N, tokens: 32, experts: 32, rows: RowUse::Rotated, rotated, copied, partial };
        check(&BatchedPlan::with_layout(shape, layout).unwrap());
    }
}

/// A plan whose answers are single products: the worst case for the weights.
fn one_product() -> BatchedPlan {
    let shape = BatchedShape { experts: 256, tokens: 32, columns_in: 1, columns_out: vec![1] };
    let plan = BatchedPlan::new(shape, Conditions::LAN).unwrap();
    assert_eq!((plan.requests(), plan.layout().shifts().len()), (1, 1));
    plan
}

/// What the client learns by dividing c1 of an answer by the polynomial of its own request: weights, if they are there.
fn divide(c1: &[u32], request: &[u32], points: usize) -> Vec<i64> {
    let mut coefficients = vec![vec![0u32; points]; 2];
    for (prime, row) in coefficients.iter_mut().enumerate() {
        let q = u64::from(PRIMES[prime]);
        for (k, x) in row.iter_mut().enumerate() {
            // Any lane of the point whose request can be divided by.
            let lane = (0..N / points).find(|l| request[prime * N + k * (N / points) + l] != 0).unwrap();
            let at = prime * N + k * (N / points) + lane;
            let inverse = (0..25).fold((1, u64::from(request[at])), |(out, square), bit| {
                let out = if (q - 2) >> bit & 1 == 1 { out * square % q } else { out };
                (out, square * square % q)
            });
            *x = (u64::from(c1[at]) * inverse.0 % q) as u32;
        }
        rlwe::ntt::inverse(prime, points, row);
    }
    let (p, q) = (u64::from(PRIMES[0]), u64::from(PRIMES[1]));
    let inverse = (1..q).step_by(1).find(|k| p * k % q == 1).unwrap();
    let mut slots: Vec<u64> = (0..points)
        .map(|k| {
            let (a, b) = (u64::from(coefficients[0][k]), u64::from(coefficients[1][k]));
            let x = a + p * ((b + q - a % q) % q * inverse % q);
            let signed = if x > p * q / 2 { x as i64 - (p * q) as i64 } else { x as i64 };
            field::from_signed(signed)
        })
        .collect();
    rlwe::ntt::forward_p(points, &mut slots);
    slots.into_iter().map(field::to_signed).collect()
}

#[test]
fn without_the_encryption_of_zero_the_client_reads_the_weights_and_with_it_nothing() {
    let plan = one_product();
    let mut rng = SecretRng::from_os();
    let weights: Vec<i16> = (0..256).map(|_| rng.next_u64() as i16).collect();
    let matrices = [ExpertWeights::new(Numbers::I16(&weights), 256, 1, 1).unwrap()];
    let secret = rlwe::SecretKey::generate(&mut rng);
    let keys = ServerKeys {
        public: std::sync::Arc::new(secret.public_key(&[3; 32], &mut rng)),
        rotations: secret.rotation_keys(&[], &mut rng),
        pool: rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().into(),
        work: super::super::Work::default(),
        tickets: Default::default(),
    };
    let request = secret.encrypt(LEVELS, &field::random_vector(&mut rng, N), &mut rng).expand(&secret.request_seed());
    let mut values = Values::new(plan.layout(), 1);
    values.put(plan.layout(), 0, std::slice::from_ref(&request));
    let tables = Tables::new(&plan, &matrices);
    let mut sums = Sums::default();
    let row = Row { matrix: 0, group: 0, output: 0, shift: 0 };
    sums.multiply(&tables, &keys, &[row], 0..1, &values, &Stop::default()).unwrap();
    let mut read = Vec::new();
    sums.ciphertexts(plan.layout(), 0..1, &mut read);
    let product = &mut read[0];

    let places = super::super::layout::places(256);
    let expected = |place: usize| {
        let (s, i) = (0..2).flat_map(|s| (0..128).map(move |i| (s, i))).find(|&(s, i)| places[s][i] == place).unwrap();
        i64::from(weights[plan.layout().coset(s, i).expert])
    };
    let read = divide(&product.c[1], &request.c[1], 256);
    assert!(read.iter().enumerate().all(|(place, &w)| w == expected(place)), "the attack wins with the guard off");
    product.add_zero(keys.public.encrypt_zero(LEVELS, &mut rng));
    let read = divide(&product.c[1], &request.c[1], 256);
    let right = read.iter().enumerate().filter(|&(place, &w)| w == expected(place)).count();
    assert!(right < 3, "the attack still reads {right} weights");
}

#[test]
fn what_travels_depends_on_the_plan_only() {
    let shape = BatchedShape { experts: 64, tokens: 32, columns_in: 5, columns_out: vec![3, 2] };
    let plan = BatchedPlan::new(shape.clone(), Conditions::LAN).unwrap();
    let cost = |fill: u64, weight: i16| {
        let share = vec![fill; shape.inputs()];
        let weights: Vec<Vec<i16>> =
            shape.columns_out.iter().map(|&o| vec![weight; shape.experts * o * shape.columns_in]).collect();
        let matrices: Vec<ExpertWeights> = weights
            .iter()
            .zip(&shape.columns_out)
            .map(|(w, &o)| ExpertWeights::new(Numbers::I16(w), shape.experts, o, shape.columns_in).unwrap())
            .collect();
        let both = |party: &mut Party, weights: Option<&[ExpertWeights]>| {
            let encryption = Encryption::exchange(party, &[5; 32], &plan.automorphisms(), 1)?;
            party.channel.reset_costs();
            multiply(party, &encryption, &plan, &share, weights)?;
            let costs = party.channel.costs();
            Ok(costs
                .iter()
                .map(|c| (c.step.clone(), c.bytes_sent, c.bytes_received, c.messages_sent))
                .collect::<Vec<_>>())
        };
        let (client, server) = testing::run(|party| both(party, None), |party| both(party, Some(&matrices)));
        (client.unwrap(), server.unwrap())
    };
    let first = cost(0, 0);
    assert_eq!(first, cost(field::P - 1, i16::MIN));
    let (step, sent, received, messages) = &first.0[1];
    assert_eq!(step, "batched product");
    let frame = crate::net::frame::HEADER as u64;
    assert_eq!(*sent, plan.request_bytes() as u64 + messages * frame);
    let answers = first.1[1].3;
    assert_eq!(*received, plan.answer_bytes() as u64 + answers * frame);
}

#[test]
fn a_peer_that_sends_rubbish_gets_a_typed_error() {
    let plan = one_product();
    let weights = vec![1i16; 256];
    let share = vec![0; plan.shape().inputs()];
    let length = SeededCiphertext::wire_len(LEVELS);
    for body in [vec![0xff; length], vec![0; length - 1], vec![0; length + 1], Vec::new()] {
        let (_, server) = testing::run(
            |party| {
                Encryption::exchange(party, &[5; 32], &[], 1)?;
                party.channel.send(Kind::Request, &body)?;
                party.channel.flush()
            },
            |party| {
                let encryption = Encryption::exchange(party, &[5; 32], &[], 1)?;
                let matrices = [ExpertWeights::new(Numbers::I16(&weights), 256, 1, 1)?];
                multiply(party, &encryption, &plan, &share, Some(&matrices))
            },
        );
        assert_eq!(server.unwrap_err().code(), "engine.bad_message");
    }
    let (client, _) = testing::run(
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &[], 1)?;
            multiply(party, &encryption, &plan, &share, None)
        },
        |party| {
            Encryption::exchange(party, &[5; 32], &[], 1)?;
            party.channel.receive(Kind::Request, length)?;
            party.channel.send(Kind::Answer, &[0; 7])?;
            party.channel.flush()
        },
    );
    assert_eq!(client.unwrap_err().code(), "engine.bad_message");
    let (_, server) = testing::run(
        |party| {
            let bytes = vec![0xff; rlwe::PublicKey::WIRE_LEN + rlwe::RotationKeys::wire_len(0)];
            party.channel.send(Kind::Keys, &bytes)?;
            party.channel.flush()
        },
        |party| Encryption::exchange(party, &[5; 32], &[], 1).map(|_| ()),
    );
    assert_eq!(server.unwrap_err().code(), "engine.bad_message");
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_travels() {
    let plan = one_product();
    let share = vec![0; plan.shape().inputs()];
    let weights = vec![1i16; 512];
    let (client, server) = testing::run(
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &[], 1)?;
            let matrices = [ExpertWeights::new(Numbers::I16(&weights[..256]), 256, 1, 1)?];
            assert!(multiply(party, &encryption, &plan, &share[1..], None).is_err());
            multiply(party, &encryption, &plan, &share, Some(&matrices))
        },
        |party| {
            let encryption = Encryption::exchange(party, &[5; 32], &[], 1)?;
            let matrices = [ExpertWeights::new(Numbers::I16(&weights), 256, 2, 1)?];
            assert!(multiply(party, &encryption, &plan, &share, None).is_err());
            let turned = Layout { rows: RowUse::Rotated, experts: 128, ..*plan.layout() };
            let shape = BatchedShape { experts: 128, ..plan.shape().clone() };
            let turned = BatchedPlan::with_layout(shape, turned)?;
            let half = [ExpertWeights::new(Numbers::I16(&weights[..128]), 128, 1, 1)?];
            // There are no keys for this plan's rotations.
            assert!(multiply(party, &encryption, &turned, &share[..128 * 32], Some(&half)).is_err());
            multiply(party, &encryption, &plan, &share, Some(&matrices))
        },
    );
    assert_eq!(client.unwrap_err().code(), "engine.bad_argument");
    assert_eq!(server.unwrap_err().code(), "engine.bad_argument");
}

#[test]
fn shares_that_are_no_field_elements_are_refused_at_both_parties_before_anything_travels() {
    let plan = one_product();
    let mut share = vec![0; plan.shape().inputs()];
    share[7] = field::P;
    let weights = vec![1i16; 256];
    let refused = |party: &mut Party, weights: Option<&[ExpertWeights]>| {
        let encryption = Encryption::exchange(party, &[5; 32], &[], 1)?;
        assert_eq!(multiply(party, &encryption, &plan, &share, weights).unwrap_err().code(), "engine.bad_argument");
        let prepared = prepare(party, &encryption, &plan, weights)?;
        assert_eq!(online(party, &encryption, prepared, &share, weights).unwrap_err().code(), "engine.bad_argument");
        assert!(!party.channel.is_over());
        multiply(party, &encryption, &plan, &vec![field::P - 1; share.len()], weights)
    };
    let matrices = [ExpertWeights::new(Numbers::I16(&weights), 256, 1, 1).unwrap()];
    let (client, server) = testing::run(|party| refused(party, None), |party| refused(party, Some(&matrices)));
    assert!(testing::open(&client.unwrap()[0], &server.unwrap()[0]).iter().all(|&x| x == -2));
}

#[test]
fn a_session_that_has_used_up_its_hiding_ends_at_both_parties_before_anything_travels() {
    let shape = BatchedShape { experts: 64, tokens: 32, columns_in: 1, columns_out: vec![6] };
    let plan = BatchedPlan::new(shape.clone(), Conditions::LAN).unwrap();
    let weights = vec![1i16; 64 * 6];
    let matrices = [ExpertWeights::new(Numbers::I16(&weights), 64, 6, 1).unwrap()];
    let share = vec![1; shape.inputs()];
    let both = |party: &mut Party, weights: Option<&[ExpertWeights]>, left: usize| {
        let encryption = Encryption::exchange(party, &[5; 32], &plan.automorphisms(), 1)?;
        assert_eq!(encryption.budget().used(), 0.0);
        encryption.budget().leave(plan.answer(), left);
        multiply(party, &encryption, &plan, &share, weights)?;
        assert!(encryption.budget().used() > 0.999_999, "both count what was answered");
        let before = party.channel.costs().iter().map(|c| c.bytes_sent + c.bytes_received).sum::<u64>();
        let error = multiply(party, &encryption, &plan, &share, weights).unwrap_err();
        let after = party.channel.costs().iter().map(|c| c.bytes_sent + c.bytes_received).sum::<u64>();
        assert_eq!(before, after);
        assert!(party.channel.is_over());
        Ok(error)
    };
    let run = |left| testing::run(|p| both(p, None, left), |p| both(p, Some(&matrices), left));
    for left in [plan.answers(), 2 * plan.answers() - 1] {
        let (client, server) = run(left);
        for error in [client.unwrap(), server.unwrap()] {
            assert_eq!(error.code(), "engine.hiding_used_up");
            assert!(error.to_string().contains("open a new session"));
        }
    }
}

/// Two connected parties over sockets.
fn socket_parties(limits: &Limits) -> (Party, Party) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = tcp::connect(listener.local_addr().unwrap(), limits).unwrap();
    let server = tcp::accept(&listener, Duration::from_secs(5)).unwrap();
    let party = |role, stream| Party {
        role,
        channel: Channel::new(Box::new(tcp::insecure_plain_loopback(stream, limits).unwrap())),
        ot: Box::new(testing::Dealer::new(role, 0)),
        triples: Box::new(testing::Dealer::new(role, 1)),
        rng: SecretRng::from_os(),
    };
    (party(Role::Client, client), party(Role::Server, server))
}

/// The server's work here takes about nine seconds of one core; it must end soon after the link does: within a fifth of a second
/// where nothing else runs.
#[test]
fn a_server_stops_soon_after_its_client_is_gone() {
    let shape = BatchedShape { experts: 64, tokens: 32, columns_in: 512, columns_out: vec![2048] };
    let layout =
        Layout { degree: N, tokens: 32, experts: 64, rows: RowUse::Rotated, rotated: 2, copied: 1, partial: 1 };
    let plan = BatchedPlan::with_layout(shape.clone(), layout).unwrap();
    let weights = vec![3i16; 64 * 2048 * 512];
    let matrices = [ExpertWeights::new(Numbers::I16(&weights), 64, 2048, 512).unwrap()];
    let share = vec![1; shape.inputs()];
    // The client dies before the first answer, or after some.
    for answers in [0, 1] {
        let (mut client, mut server) = socket_parties(&Limits::default());
        let (gone, error, noticed) = std::thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let encryption = Encryption::exchange(&mut server, &[5; 32], &plan.automorphisms(), 1).unwrap();
                let error = multiply(&mut server, &encryption, &plan, &share, Some(&matrices)).unwrap_err();
                (error, Instant::now())
            });
            let encryption = Encryption::exchange(&mut client, &[5; 32], &plan.automorphisms(), 1).unwrap();
            let Encryption::Client(keys) = &encryption else { unreachable!() };
            send_requests(&mut client, keys, &plan, 0, plan.segments()[0].clone(), &share).unwrap();
            let first = parts(&plan, 0).remove(0).len() * plan.answer().answer_len(N);
            (0..answers).for_each(|_| drop(client.channel.receive(Kind::Answer, first).unwrap()));
            std::thread::sleep(Duration::from_millis(300));
            drop(client);
            let gone = Instant::now();
            let (error, noticed) = serving.join().unwrap();
            (gone, error, noticed)
        });
        assert!(matches!(&error, Error::PeerGone { step } if step == "batched product"), "{error}");
        let late = noticed.saturating_duration_since(gone);
        println!("the server stopped {late:?} after its client");
        assert!(late < Duration::from_secs(4), "{late:?}");
    }
}
