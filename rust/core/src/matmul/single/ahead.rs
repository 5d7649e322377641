//! The same product in two parts: everything costly before the input exists, one message and a product in the clear after.

use super::{Matrix, Plan, check_share, clear, client, server_adding};
use crate::error::{Error, Result};
use crate::field;
use crate::matmul::Encryption;
use crate::net::Kind;
use crate::party::Party;
use zeroize::Zeroizing;

/// One party's part of one prepared product, good for one input: its share of r W, and at the client the random r.
pub struct Prepared {
    plan: Plan,
    random: Option<Zeroizing<Vec<u64>>>,
    share: Zeroizing<Vec<u64>>,
}

/// Makes one product ahead; one round, the cost of [`super::multiply`]. The server passes its weights, the client none.
pub fn prepare(party: &mut Party, encryption: &Encryption, plan: &Plan, weights: Option<Matrix>) -> Result<Prepared> {
    let plan = *plan;
    party.step("single product ahead", |party| match (encryption, weights) {
        (Encryption::Client(keys), None) => {
            let random = Zeroizing::new(field::random_vector(&mut party.rng, plan.shape.rows * plan.shape.columns));
            let share = keys.pool.install(|| client(party, &keys.secret, &plan, &random))?;
            Ok(Prepared { plan, random: Some(random), share: Zeroizing::new(share) })
        }
        (Encryption::Server(keys), Some(weights)) => {
            let share = keys.pool.install(|| server_adding(party, &keys.public, &plan, weights, None))?;
            Ok(Prepared { plan, random: None, share: Zeroizing::new(share) })
        }
        _ => Err(Error::BadArgument("the server passes its weights, the client none".into())),
    })
}

/// The product when the input is there: x - r travels, 41 bits an element, the server multiplies in the clear modulo p, and
/// nothing comes back. Error: that of the preparation, at most 1. Cost: half a round.
pub fn online(
    party: &mut Party,
    encryption: &Encryption,
    prepared: Prepared,
    x: &[u64],
    weights: Option<Matrix>,
) -> Result<Vec<u64>> {
    let Prepared { plan, random, share } = prepared;
    check_share(&plan, x)?;
    party.step("single product online", |party| match (encryption, random, weights) {
        (Encryption::Client(_), Some(random), None) => {
            let difference: Vec<u64> = x.iter().zip(random.iter()).map(|(&x, &r)| field::sub(x, r)).collect();
            party.channel.send(Kind::Opening, &field::pack(&difference))?;
            party.channel.flush()?;
            Ok(share.to_vec())
        }
        (Encryption::Server(keys), None, Some(weights)) => {
            if (weights.rows(), weights.columns()) != (plan.shape.columns, plan.shape.outputs) {
                return Err(Error::BadArgument("these weights do not have the shape of the plan".into()));
            }
            let body = party.channel.receive(Kind::Opening, field::packed_len(x.len(), field::P_BITS))?;
            let difference = field::unpack(&body, x.len())
                .map_err(|_| party.channel.refuse("a masked input that is no vector of field elements"))?;
            let sum: Zeroizing<Vec<u64>> =
                Zeroizing::new(difference.iter().zip(x).map(|(&d, &x)| field::add(d, x)).collect());
            let mut out = keys.pool.install(|| clear::product(&sum, plan.shape.rows, &weights));
            out.iter_mut().zip(share.iter()).for_each(|(out, &share)| *out = field::add(*out, share));
            Ok(out)
        }
        _ => Err(Error::BadArgument("the server passes its weights, the client none".into())),
    })
}
