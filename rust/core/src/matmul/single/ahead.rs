//! The same product in two parts: everything costly before the input exists, one message and a product in the clear after.

use super::{Item, Matrix, Plan, Section, check_share, clear, client_batch, server_batch};
use crate::error::{Error, Result};
use crate::field;
use crate::net::Kind;
use crate::party::Party;
use crate::rlwe::{PublicKey, SecretKey};
use zeroize::Zeroizing;

/// The client's part of one prepared product: a random matrix r and its share of r W. Good for one input.
pub struct PreparedClient {
    plan: Plan,
    random: Zeroizing<Vec<u64>>,
    share: Zeroizing<Vec<u64>>,
}

/// The server's part of one prepared product: its share of r W. Good for one input.
pub struct PreparedServer {
    plan: Plan,
    share: Zeroizing<Vec<u64>>,
}

/// Makes one product ahead; one round, the cost of [`super::client`].
pub fn prepare_client(party: &mut Party, key: &SecretKey, plan: &Plan) -> Result<PreparedClient> {
    let random = Zeroizing::new(field::random_vector(&mut party.rng, plan.shape.rows * plan.shape.columns));
    let share = client_batch(party, key, &[Section { plan, items: &[&random[..]] }])?.swap_remove(0).swap_remove(0);
    Ok(PreparedClient { plan: *plan, random, share: Zeroizing::new(share) })
}

/// The server's side of [`prepare_client`].
pub fn prepare_server(party: &mut Party, key: &PublicKey, plan: &Plan, weights: Matrix) -> Result<PreparedServer> {
    let items = [Item { weights, share: None }];
    let share = server_batch(party, key, &[Section { plan, items: &items }])?.swap_remove(0).swap_remove(0);
    Ok(PreparedServer { plan: *plan, share: Zeroizing::new(share) })
}

/// The client's side when the input is there: x - r travels, 41 bits an element, and nothing comes back.
/// Error: that of the preparation, at most 1. Cost: half a round.
pub fn online_client(party: &mut Party, prepared: PreparedClient, x: &[u64]) -> Result<Vec<u64>> {
    check_share(&prepared.plan, x)?;
    let difference: Vec<u64> = x.iter().zip(prepared.random.iter()).map(|(&x, &r)| field::sub(x, r)).collect();
    party.channel.send(Kind::Opening, &field::pack(&difference))?;
    party.channel.flush()?;
    Ok(prepared.share.to_vec())
}

/// The server's side of [`online_client`]: multiplies in the clear, modulo p.
pub fn online_server(party: &mut Party, prepared: PreparedServer, weights: Matrix, x: &[u64]) -> Result<Vec<u64>> {
    let plan = prepared.plan;
    check_share(&plan, x)?;
    if (weights.rows(), weights.columns()) != (plan.shape.columns, plan.shape.outputs) {
        return Err(Error::BadArgument("these weights do not have the shape of the plan".into()));
    }
    let body = party.channel.receive(Kind::Opening, field::packed_len(x.len(), field::P_BITS))?;
    let difference = field::unpack(&body, x.len())
        .map_err(|_| party.channel.refuse("a masked input that is no vector of field elements"))?;
    let sum: Zeroizing<Vec<u64>> = Zeroizing::new(difference.iter().zip(x).map(|(&d, &x)| field::add(d, x)).collect());
    let mut out = clear::product(&sum, plan.shape.rows, &weights);
    out.iter_mut().zip(prepared.share.iter()).for_each(|(out, &share)| *out = field::add(*out, share));
    Ok(out)
}
