//! The same product in two parts: everything costly before the input exists, one message and a product in the clear after.

use super::{Matrix, Plan, Shape, check_share, clear, client, server_adding};
use crate::error::{Error, Result};
use crate::field;
use crate::matmul::Encryption;
use crate::matmul::ticket::Ticket;
use crate::net::Kind;
use crate::party::Party;
use zeroize::Zeroizing;

/// One party's part of one prepared product, good for one input: its share of r W, and at the client the random r.
pub struct Prepared {
    plan: Plan,
    ticket: Ticket,
    random: Option<Zeroizing<Vec<u64>>>,
    share: Zeroizing<Vec<u64>>,
}

impl Prepared {
    /// What a store keeps of this party's part: the ticket, r if there is one, the share, packed.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let mut out = Zeroizing::new(Vec::with_capacity(stored_len(&self.plan, self.random.is_some())));
        out.extend_from_slice(&self.ticket.to_stored());
        for values in self.random.iter().chain([&self.share]) {
            out.extend_from_slice(&Zeroizing::new(field::pack(values)));
        }
        out
    }

    /// The inverse, for the plan of a product of the same shape, in this or a later session; refuses what this party cannot
    /// have written.
    pub fn from_bytes(plan: &Plan, encryption: &Encryption, bytes: &[u8]) -> Result<Self> {
        let (Shape { rows, columns, outputs }, role) = (plan.shape, encryption.role());
        let wrong = || Error::Store("a prepared product has another length".into());
        if bytes.len() != stored_len(plan, role.is_client()) {
            return Err(wrong());
        }
        let (ticket, bytes) = bytes.split_first_chunk().ok_or_else(wrong)?;
        let ticket = encryption.tickets().restored(ticket);
        let (random, share) = bytes.split_at(bytes.len() - field::packed_len(rows * outputs, field::P_BITS));
        let unpack = |bytes, n| field::unpack(bytes, n).map(Zeroizing::new);
        let random = if role.is_client() { Some(unpack(random, rows * columns)?) } else { None };
        Ok(Self { plan: *plan, ticket, random, share: unpack(share, rows * outputs)? })
    }
}

fn stored_len(plan: &Plan, with_random: bool) -> usize {
    let Shape { rows, columns, outputs } = plan.shape;
    let random = if with_random { field::packed_len(rows * columns, field::P_BITS) } else { 0 };
    Ticket::STORED_LEN + random + field::packed_len(rows * outputs, field::P_BITS)
}

/// Makes one product ahead; one round, the cost of [`super::multiply`]. The server passes its weights, the client none.
pub fn prepare(party: &mut Party, encryption: &Encryption, plan: &Plan, weights: Option<Matrix>) -> Result<Prepared> {
    let plan = *plan;
    party.step("single product ahead", |party| match (encryption, weights) {
        (Encryption::Client(keys), None) => {
            let random = Zeroizing::new(field::random_vector(&mut party.rng, plan.shape.rows * plan.shape.columns));
            let share = keys.pool.install(|| client(party, &keys.secret, &plan, &random))?;
            let ticket = encryption.tickets().next();
            Ok(Prepared { plan, ticket, random: Some(random), share: Zeroizing::new(share) })
        }
        (Encryption::Server(keys), Some(weights)) => {
            let share = keys.pool.install(|| server_adding(party, &keys.public, &plan, weights, None))?;
            let ticket = encryption.tickets().next();
            Ok(Prepared { plan, ticket, random: None, share: Zeroizing::new(share) })
        }
        _ => Err(Error::BadArgument("the server passes its weights, the client none".into())),
    })
}

/// The product when the input is there: x - r travels, 41 bits an element, the server multiplies in the clear modulo p, and
/// nothing comes back. Error: that of the preparation, at most 1. Cost: half a round. Both parties must use the same
/// prepared product: one of another session is refused before a byte moves, another one of this session when the server
/// sees its number.
pub fn online(
    party: &mut Party,
    encryption: &Encryption,
    prepared: Prepared,
    x: &[u64],
    weights: Option<Matrix>,
) -> Result<Vec<u64>> {
    encryption.tickets().check(&prepared.ticket)?;
    let Prepared { plan, ticket, random, share } = prepared;
    check_share(&plan, x)?;
    party.step("single product online", |party| match (encryption, random, weights) {
        (Encryption::Client(_), Some(random), None) => {
            let difference: Vec<u64> = x.iter().zip(random.iter()).map(|(&x, &r)| field::sub(x, r)).collect();
            party.channel.send(Kind::Opening, &[&ticket.to_bytes()[..], &field::pack(&difference)].concat())?;
            party.channel.flush()?;
            Ok(share.to_vec())
        }
        (Encryption::Server(keys), None, Some(weights)) => {
            if (weights.rows(), weights.columns()) != (plan.shape.columns, plan.shape.outputs) {
                return Err(Error::BadArgument("these weights do not have the shape of the plan".into()));
            }
            let length = Ticket::WIRE_LEN + field::packed_len(x.len(), field::P_BITS);
            let body = party.channel.receive(Kind::Opening, length)?;
            let difference = field::unpack(ticket.strip(&body)?, x.len())
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
