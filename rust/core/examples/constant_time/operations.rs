//! What is measured: local work on secrets, each with a fixed and a random class, against peers that were recorded.

use crate::valgrind::undefine;
use cloister_core::matmul::single::{self, CostModel, Matrix, Plan, Shape};
use cloister_core::matmul::{BatchedPlan, BatchedShape, Conditions, ExpertWeights, Numbers, batched};
use cloister_core::net::{Channel, Pipe};
use cloister_core::ot::{BaseKind, ExtendedOt, GroupBits, OtConfig, OtKind, OtSupply, foreign};
use cloister_core::random::SecretRng;
use cloister_core::rlwe::{self, Answer, AnswerPlan, SecretKey};
use cloister_core::testing::replay::{Script, heard, insecure_party, ours};
use cloister_core::{Party, Result, Role, field, protocol};
use std::hint::black_box;
use std::time::Instant;

/// An operation that can be run on either class of secrets.
pub struct Operation {
    /// What it is.
    pub name: String,
    time: Box<dyn FnMut(bool, bool) -> f64>,
}

impl Operation {
    /// Secrets are made, and marked if this runs under memcheck, before the time is taken.
    fn new<S, T>(
        name: impl Into<String>,
        mut secrets: impl FnMut(bool) -> S + 'static,
        mut mark: impl FnMut(&mut S) + 'static,
        mut run: impl FnMut(S) -> T + 'static,
    ) -> Self {
        let time = move |fixed, undefined| {
            let mut secret = secrets(fixed);
            if undefined {
                mark(&mut secret);
            }
            let begun = Instant::now();
            let out = black_box(run(black_box(secret)));
            let took = begun.elapsed().as_secs_f64();
            drop(out);
            took
        };
        Self { name: name.into(), time: Box::new(time) }
    }

    /// Seconds of one run.
    pub fn timed(&mut self, fixed: bool) -> f64 {
        (self.time)(fixed, false)
    }

    /// One run on secrets that are marked, after one that is not, which makes the tables.
    pub fn once_undefined(&mut self) {
        (self.time)(true, false);
        (self.time)(false, true);
    }
}

fn random() -> SecretRng {
    SecretRng::from_os()
}

/// One of two, after both were made: what goes before a run must be the same for both classes, or the caches and the
/// predictors tell them apart.
fn either<T: Copy>(fixed: bool, extreme: T, random: &[T]) -> Vec<T> {
    let extreme: Vec<T> = random.iter().map(|_| black_box(extreme)).collect();
    let chosen = black_box([random, &extreme])[usize::from(fixed)];
    chosen.to_vec()
}

fn random_elements(n: usize) -> Vec<u64> {
    field::random_vector(&mut random(), n)
}

/// All operations, each made when its turn comes; the last one leaks on purpose.
pub fn all() -> Vec<Box<dyn FnOnce() -> Operation>> {
    let mut out: Vec<Box<dyn FnOnce() -> Operation>> = vec![
        Box::new(field_arithmetic),
        Box::new(packing),
        Box::new(secret_key),
        Box::new(encryption),
        Box::new(decryption),
        Box::new(product),
        Box::new(batched_product),
    ];
    for kind in [BaseKind::Ristretto, BaseKind::MlKem768] {
        out.push(Box::new(move || base_transfers(kind)));
    }
    for (name, step) in STEPS {
        for role in [Role::Client, Role::Server] {
            out.push(Box::new(move || protocol_step(name, step, role)));
        }
    }
    let soft = |bits| OtKind::SoftSpoken(GroupBits::new(bits).expect("a size of groups"));
    for kind in [soft(1), soft(4), OtKind::Silent] {
        for sends in [true, false] {
            out.push(Box::new(move || extension(kind, sends)));
        }
    }
    out.push(Box::new(early_end));
    out
}

fn field_arithmetic() -> Operation {
    const COUNT: usize = 4096;
    let secrets = |fixed: bool| [field::P - 1, 1].map(|extreme| either(fixed, extreme, &random_elements(COUNT)));
    let run = |[mut a, b]: [Vec<u64>; 2]| {
        for (a, &b) in a.iter_mut().zip(&b) {
            *a = field::sub(field::mul(field::add(*a, b), b), field::neg(*a));
            *a = field::from_signed(field::to_signed(*a));
        }
        a
    };
    Operation::new("field: add, sub, mul, neg, signs", secrets, |s| s.iter_mut().for_each(|v| undefine(v)), run)
}

fn packing() -> Operation {
    let secrets = |fixed: bool| either(fixed, 0, &random_elements(4096));
    Operation::new("field: packing of shares", secrets, |v| undefine(v), |v| field::pack(&v))
}

/// Seeds whose rejection samplers throw away equally many words: how many, the time shows, and may.
fn equal_seeds() -> Vec<u64> {
    let kept = |word: u64| (0..32).filter(|k| word >> (2 * k) & 3 != 3).count();
    let words = |seed| {
        let (mut rng, mut have, mut used) = (SecretRng::from_insecure_fixed_seed(seed), 0, 0);
        while have < rlwe::N {
            have += kept(rng.next_u64());
            used += 1;
        }
        used
    };
    let wanted = words(1);
    (1..).filter(|&seed| words(seed) == wanted).take(64).collect()
}

fn secret_key() -> Operation {
    let seeds = equal_seeds();
    let secrets = move |fixed: bool| {
        let which = random().next_u64() as usize % seeds.len();
        [seeds[if fixed { 0 } else { which }]]
    };
    let run = |[seed]: [u64; 1]| SecretKey::generate(&mut SecretRng::from_insecure_fixed_seed(seed));
    Operation::new("secret key: sampling, transform", secrets, |s| undefine(s), run)
}

fn encryption() -> Operation {
    let key = SecretKey::generate(&mut random());
    let secrets = |fixed: bool| {
        let plain = either(fixed, 0, &random_elements(rlwe::N));
        (plain, [random().next_u64()])
    };
    let run = move |(plain, [seed]): (Vec<u64>, [u64; 1])| {
        key.encrypt(rlwe::LEVELS, &plain, &mut SecretRng::from_insecure_fixed_seed(seed))
    };
    Operation::new(
        "encryption: plaintext, errors",
        secrets,
        |s| {
            undefine(&mut s.0);
            undefine(&mut s.1)
        },
        run,
    )
}

fn decryption() -> Operation {
    let shape = rlwe::params::Shape { level: 6, products: 4, nonzero: 16, magnitude: 1e12, rotations: 0 };
    let plan = AnswerPlan::slots(&shape).expect("a plan of this shape fits");
    let mut bytes = vec![0; plan.answer_len(rlwe::N)];
    random().fill(&mut bytes);
    let answer = Answer::from_bytes(&bytes, &plan, rlwe::N).expect("any bytes are an answer in slots");
    // As many keys in either class, so that neither is warmer in the cache.
    let keys = [true, false].map(|fixed| {
        (0..8)
            .map(|k| SecretKey::generate(&mut SecretRng::from_insecure_fixed_seed(if fixed { 1 } else { 2 + k })))
            .collect::<Vec<_>>()
    });
    // For memcheck a key is made from an undefined seed instead.
    let secrets = |fixed| (fixed, random().next_u64() as usize % 8, None);
    let mark = |s: &mut (bool, usize, Option<SecretKey>)| {
        let mut seed = [3];
        undefine(&mut seed);
        s.2 = Some(SecretKey::generate(&mut SecretRng::from_insecure_fixed_seed(seed[0])));
    };
    let run = move |(fixed, which, made): (bool, usize, Option<SecretKey>)| {
        made.as_ref().unwrap_or(&keys[usize::from(!fixed)][which]).open_slots(&answer, &plan).map(drop)
    };
    Operation::new("decryption: key, rounding", secrets, mark, run)
}

fn product() -> Operation {
    let shape = Shape { rows: 3, columns: 32, outputs: 32 };
    let plan = Plan::new(shape, 16, &CostModel::default()).expect("the plan fits");
    let step = move |party: &mut Party, x: &[u64], weights: &[i16]| {
        let weights = Matrix::from_i16(shape.columns, shape.outputs, weights)?;
        let weights = (!party.role.is_client()).then_some(weights);
        single::multiply(party, ours(party.role), &plan, x, weights).map(drop)
    };
    weights_operation(
        "product: weights 0 or random, share",
        shape.rows * shape.columns,
        shape.columns * shape.outputs,
        step,
    )
}

fn batched_product() -> Operation {
    let shape = BatchedShape { experts: 2, tokens: 64, columns_in: 5, columns_out: vec![3] };
    let plan = BatchedPlan::new(shape.clone(), Conditions::LAN).expect("the plan fits");
    let inputs = shape.inputs();
    let step = move |party: &mut Party, x: &[u64], weights: &[i16]| {
        let weights = [ExpertWeights::new(Numbers::I16(weights), 2, 3, 5)?];
        let weights = (!party.role.is_client()).then_some(&weights[..]);
        batched::multiply(party, ours(party.role), &plan, x, weights).map(drop)
    };
    weights_operation("batched product: weights 0 or random, share", inputs, 30, step)
}

/// The server's side of a product.
fn weights_operation(
    name: &str,
    inputs: usize,
    weights: usize,
    step: impl Fn(&mut Party, &[u64], &[i16]) -> Result<()> + Sync + 'static,
) -> Operation {
    let (x, w) = (vec![1; inputs], vec![1; weights]);
    let [_, script] = heard(|role, pipe| step(&mut insecure_party(role, pipe, 4), &x, &w)).expect("both are honest");
    let secrets = move |fixed: bool| {
        let mut rng = random();
        let numbers = |rng: &mut SecretRng| (0..weights).map(|_| rng.next_u64() as i16).collect::<Vec<i16>>();
        let w = either(fixed, 0, &numbers(&mut rng));
        let x = either(fixed, 0, &random_elements(inputs));
        let party = insecure_party(Role::Server, Box::new(Script::new(script.clone())), rng.next_u64());
        (x, w, party)
    };
    let mark = |s: &mut (Vec<u64>, Vec<i16>, Party)| {
        undefine(&mut s.0);
        undefine(&mut s.1);
    };
    Operation::new(name, secrets, mark, move |(x, w, mut party)| step(&mut party, &x, &w).expect("the recording fits"))
}

fn base_transfers(kind: BaseKind) -> Operation {
    const COUNT: usize = 16;
    let run = move |role: Role, channel: &mut Channel, choices: &[u8], seed| {
        let mut rng = SecretRng::from_insecure_fixed_seed(seed);
        match role {
            Role::Client => foreign::send(channel, kind, COUNT, &mut rng),
            Role::Server => foreign::receive(channel, kind, choices, &mut rng),
        }
    };
    let record = move |role, pipe: Box<dyn Pipe>| run(role, &mut Channel::new(pipe), &[1; COUNT], 3);
    let [_, script] = heard(record).expect("both are honest");
    let secrets = move |fixed: bool| {
        let bits = random_elements(COUNT).iter().map(|x| (x & 1) as u8).collect::<Vec<_>>();
        let choices: [u8; COUNT] = either(fixed, 0, &bits).try_into().expect("as many as there were");
        (choices, [random().next_u64()], Channel::new(Box::new(Script::new(script.clone()))))
    };
    let mark = |s: &mut ([u8; COUNT], [u64; 1], Channel)| {
        undefine(&mut s.0);
        undefine(&mut s.1);
    };
    Operation::new(
        format!("base transfers, {kind:?}: choices"),
        secrets,
        mark,
        move |(choices, [seed], mut channel): ([u8; COUNT], [u64; 1], Channel)| {
            run(Role::Server, &mut channel, &choices, seed).expect("the recording fits")
        },
    )
}

fn kind_name(kind: OtKind) -> String {
    match kind {
        OtKind::SoftSpoken(_) => format!("{kind:?}").replace("GroupBits", "k = "),
        OtKind::Silent => "silent".into(),
    }
}

/// One side of an extension, all its secrets from one seed; the set-up before it is not timed, but is checked by memcheck.
fn extension(kind: OtKind, sends: bool) -> Operation {
    const COUNT: usize = 4096;
    let config = OtConfig { base: BaseKind::Ristretto, kind };
    let set_up = move |role, channel: &mut Channel, seed| {
        ExtendedOt::set_up(channel, role, &[1; 32], config, &mut SecretRng::from_insecure_fixed_seed(seed))
    };
    let transfer = |client_sends: bool, role: Role, ot: &mut ExtendedOt, channel: &mut Channel| {
        if role.is_client() == client_sends {
            ot.send(channel, COUNT).map(drop)
        } else {
            ot.receive(channel, COUNT).map(drop)
        }
    };
    // Both halves are recorded over channels of their own, so that each can be replayed alone.
    let setting = heard(|role, pipe| set_up(role, &mut Channel::new(pipe), 5).map(drop)).expect("both are honest");
    let pools: [std::sync::Mutex<Option<ExtendedOt>>; 2] = Default::default();
    heard(|role, pipe| {
        let made = set_up(role, &mut Channel::new(pipe), 5)?;
        *pools[usize::from(!role.is_client())].lock().expect("no holder panics") = Some(made);
        Ok(())
    })
    .expect("both are honest");
    let transferring = heard(|role, pipe| {
        let mut own = pools[usize::from(!role.is_client())].lock().expect("no holder panics");
        transfer(sends, role, own.as_mut().expect("it was set up"), &mut Channel::new(pipe))
    })
    .expect("both are honest");
    let [setting, _] = setting;
    let [transferring, _] = transferring;
    let secrets = move |fixed: bool| {
        let seed = if fixed { 7 } else { random().next_u64() };
        let mut channel = Channel::new(Box::new(Script::new(setting.clone())));
        let ot = set_up(Role::Client, &mut channel, seed).expect("the recording fits");
        (ot, Channel::new(Box::new(Script::new(transferring.clone()))))
    };
    let again = heard(|role, pipe| set_up(role, &mut Channel::new(pipe), 5).map(drop)).expect("both are honest");
    let mark = move |s: &mut (ExtendedOt, Channel)| {
        let mut seed = [random().next_u64()];
        undefine(&mut seed);
        let mut channel = Channel::new(Box::new(Script::new(again[0].clone())));
        s.0 = set_up(Role::Client, &mut channel, seed[0]).expect("the recording fits");
    };
    let side = if sends { "sender" } else { "chooser" };
    Operation::new(format!("transfers, {}: {side}", kind_name(kind)), secrets, mark, move |(mut ot, mut channel)| {
        transfer(sends, Role::Client, &mut ot, &mut channel).expect("the recording fits");
        ot
    })
}

type Step = fn(&mut Party, &[u64], &[u8]) -> Result<()>;

const STEPS: [(&str, Step); 9] = [
    ("truncate", |p, x, _| protocol::truncate(p, x, 12).map(drop)),
    ("to_ring", |p, x, _| protocol::to_ring(p, x, 0, 13).map(drop)),
    ("is_negative", |p, x, _| protocol::is_negative(p, x, 20, 4).map(drop)),
    ("equal", |p, x, _| protocol::equal(p, x, x).map(drop)),
    ("and", |p, _, b| protocol::and(p, b, b).map(drop)),
    ("select", |p, x, b| protocol::select(p, b, x).map(drop)),
    ("multiply", |p, x, _| protocol::multiply(p, x, x).map(drop)),
    ("one_hot, 4 bits", |p, x, _| protocol::one_hot(p, x, 4, 16).map(drop)),
    ("one_hot, 9 bits", |p, x, _| protocol::one_hot(p, x, 9, 64).map(drop)),
];

fn protocol_step(name: &str, step: Step, role: Role) -> Operation {
    const COUNT: usize = 64;
    let bits = |x: &[u64]| x.iter().map(|v| (v & 1) as u8).collect::<Vec<u8>>();
    let zero = vec![0; COUNT];
    let heard =
        heard(|role, pipe| step(&mut insecure_party(role, pipe, 4), &zero, &bits(&zero))).expect("both are honest");
    let script = heard[usize::from(!role.is_client())].clone();
    let secrets = move |fixed: bool| {
        let x = either(fixed, 0, &random_elements(COUNT));
        let bits = bits(&x);
        (x, bits, [random().next_u64()], Box::new(Script::new(script.clone())))
    };
    let mark = |s: &mut (Vec<u64>, Vec<u8>, [u64; 1], Box<Script>)| {
        undefine(&mut s.0);
        undefine(&mut s.1);
        undefine(&mut s.2);
    };
    Operation::new(format!("{name}, {role:?}: shares, pads"), secrets, mark, move |(x, bits, [seed], script)| {
        step(&mut insecure_party(role, script, seed), &x, &bits).expect("the recording fits")
    })
}

/// A comparison that ends at the first difference.
fn early_end() -> Operation {
    let secrets = |fixed: bool| {
        let mut tag = vec![0u8; 4096];
        random().fill(&mut tag);
        either(fixed, 0, &tag)
    };
    let run = |tag: Vec<u8>| tag.iter().position(|&byte| black_box(byte) != 0).is_some();
    Operation::new("planted: a comparison with an early end", secrets, |tag| undefine(tag), run)
}
