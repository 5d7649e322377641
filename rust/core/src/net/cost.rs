//! What a computation cost, step by step, and how two parties' books are compared.

use std::fmt::Write;

/// What one step cost this party.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepCost {
    /// The path of the step, outer names first: `silu/compare`.
    pub step: String,
    /// Bytes sent, headers included.
    pub bytes_sent: u64,
    /// Bytes received, headers included.
    pub bytes_received: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Times that this party had to wait for the peer after sending something (a round as the receiver sees it).
    pub rounds: u64,
    /// Wall-clock seconds inside the step, inner steps excluded.
    pub seconds: f64,
}

impl StepCost {
    /// This cost as one JSON object.
    pub fn to_json(&self) -> String {
        let mut step = String::with_capacity(self.step.len());
        for c in self.step.chars() {
            match c {
                '"' | '\\' => step.extend(['\\', c]),
                c if c.is_control() => write!(step, "\\u{:04x}", u32::from(c)).expect("a string takes any text"),
                c => step.push(c),
            }
        }
        format!(
            "{{\"step\":\"{step}\",\"bytes_sent\":{},\"bytes_received\":{},\"messages_sent\":{},\"rounds\":{},\
             \"seconds\":{:.9}}}",
            self.bytes_sent, self.bytes_received, self.messages_sent, self.rounds, self.seconds
        )
    }
}

/// Costs as a JSON array.
pub fn to_json(costs: &[StepCost]) -> String {
    format!("[{}]", costs.iter().map(StepCost::to_json).collect::<Vec<_>>().join(","))
}

/// The sum of all steps, under the name `total`.
pub fn total(costs: &[StepCost]) -> StepCost {
    let mut sum = StepCost { step: "total".into(), ..StepCost::default() };
    for cost in costs {
        sum.bytes_sent += cost.bytes_sent;
        sum.bytes_received += cost.bytes_received;
        sum.messages_sent += cost.messages_sent;
        sum.rounds += cost.rounds;
        sum.seconds += cost.seconds;
    }
    sum
}

/// The first difference between two parties' books: every step that moved a byte must be in both, and what one sent
/// the other received, to the byte. Rounds are each party's own waits, so they may differ where only one answers.
pub fn difference(ours: &[StepCost], theirs: &[StepCost]) -> Option<String> {
    let moved = |c: &&StepCost| c.bytes_sent + c.bytes_received > 0;
    for cost in ours.iter().filter(moved) {
        let Some(twin) = theirs.iter().find(|c| c.step == cost.step) else {
            return Some(format!("only one party has the step {}", cost.step));
        };
        if (cost.bytes_sent, cost.bytes_received) != (twin.bytes_received, twin.bytes_sent) {
            return Some(format!(
                "{}: sent {} and received {}, but the peer received {} and sent {}",
                cost.step, cost.bytes_sent, cost.bytes_received, twin.bytes_received, twin.bytes_sent
            ));
        }
    }
    let unknown = theirs.iter().filter(moved).find(|c| ours.iter().all(|o| o.step != c.step));
    unknown.map(|c| format!("only one party has the step {}", c.step))
}
