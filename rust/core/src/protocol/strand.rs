//! Strands: a long digit-by-digit comparison of one number of each party, one 1-of-16 transfer a digit.
//!
//! A strand is a run of digits that are looked at one after the other. What is known so far is one shared bit, the
//! *state*; it goes into the next transfer beside the digit. The chooser's digit and its share of the state choose among
//! the answers that the other party, the *answerer*, has made from its own digit and its own share, so after the first
//! digit of four bits each has three. Nothing else is needed: no conjunction ever.
//!
//! * [`Asks::Greater`]: from the lowest digit up, state = greater so far; next = [a > b] XOR [a = b] state. One bit an answer.
//! * [`Asks::Equal`]: state = equal so far. One bit an answer.
//! * [`Asks::Both`]: from the highest digit down, state = equal so far; [a > b] state is added up. Two bits an answer.
//!
//! The parties change places after every digit: the answerer knows its share of the new state at once, since that is
//! what it masked its answers with, and chooses for the next digit in the message that carries its answers. One half of
//! the elements begins with the one answerer and the other half with the other, so both parties always work, equally
//! much. A strand of d digits takes d + 1 rounds.

use super::correlate::Wiped;
use super::wire::{Reader, Writer, gather};
use super::{Bits, same_length};
use crate::error::Result;
use crate::net::Kind;
use crate::party::{Party, Role};
use std::ops::Range;

/// Random 1-of-16 transfers fetched at once, one silent batch.
const BATCH: usize = 1 << 18;

/// What a strand finds out of the server's number a and the client's number b.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asks {
    /// [a > b].
    Greater,
    /// [a = b].
    Equal,
    /// Both.
    Both,
}

/// Bits of a number that are looked at together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Digit {
    shift: u32,
    width: u32,
}

/// Some bits of the numbers, and what is asked about them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Strand {
    asks: Asks,
    digits: Vec<Digit>,
}

impl Strand {
    /// Bits that a strand of `digits` digits has room for.
    pub fn room(digits: u32) -> u32 {
        3 * digits + 1
    }

    /// A strand over `width` bits from `shift` up.
    pub fn new(asks: Asks, shift: u32, width: u32) -> Self {
        let mut digits = Vec::new();
        let mut done = 0;
        while done < width {
            let next = if done == 0 { 4 } else { 3 }.min(width - done);
            let from = if asks == Asks::Both { width - done - next } else { done };
            digits.push(Digit { shift: shift + from, width: next });
            done += next;
        }
        Self { asks, digits }
    }

    /// Transfers an element.
    pub fn transfers(&self) -> usize {
        self.digits.len()
    }

    /// Bits on the wire an element: 4 choose, the rest answer.
    pub fn bits(&self) -> usize {
        (0..self.digits.len()).map(|step| 4 + self.answer_bits(step) as usize).sum()
    }

    fn two(&self) -> bool {
        self.asks == Asks::Both
    }

    /// Places that a transfer has: a digit, and the state but for the first.
    fn places(&self, step: usize) -> u32 {
        1 << (self.digits[step].width + u32::from(step > 0))
    }

    /// Bits of one transfer's answers. Place 0 needs none: what it would see is the answerer's own share, to which the
    /// others are relative.
    fn answer_bits(&self, step: usize) -> u32 {
        if step >= self.digits.len() {
            return 0;
        }
        (self.places(step) - 1) * if self.two() { 2 } else { 1 }
    }

    /// What a party chooses: its digit, and above it its share of the state.
    #[inline(always)]
    fn place(&self, step: usize, number: u64, state: u8) -> u32 {
        let above = if step == 0 { 0 } else { u32::from(state) << self.digits[step].width };
        self.digit(step, number) | above
    }

    fn digit(&self, step: usize, number: u64) -> u32 {
        let Digit { shift, width } = self.digits[step];
        (number >> shift) as u32 & ((1 << width) - 1)
    }

    /// What the answerer, who has this digit and this share of the state, tells each place: the first bit of place j in
    /// bit j, the second in bit 16 + j.
    #[inline(always)]
    fn truth(&self, step: usize, answerer: Role, digit: u32, state: u8) -> u32 {
        let values = 1u32 << self.digits[step].width;
        let equal = 1u32 << digit;
        let below = equal - 1;
        // The place is the client's digit when the server answers, else the server's.
        let greater = if answerer == Role::Server { below } else { ((1 << values) - 1) & !(below | equal) };
        if step == 0 {
            return match self.asks {
                Asks::Greater => greater,
                Asks::Equal => equal,
                Asks::Both => greater | equal << 16,
            };
        }
        // The chooser's share of the state is the place's highest bit: with 0 the state is ours, with 1 its negation.
        let ours = u32::from(state).wrapping_neg();
        let with_state = |table: u32| (table & ours) | (table & !ours) << values;
        match self.asks {
            Asks::Greater => (greater | greater << values) ^ with_state(equal),
            Asks::Equal => with_state(equal),
            Asks::Both => with_state(greater) | with_state(equal) << 16,
        }
    }
}

/// The half of the elements in which a party answers in a step: the server in the first half in even steps.
fn half_answered_by(role: Role, step: usize, n: usize) -> Range<usize> {
    if step.is_multiple_of(2) == (role == Role::Server) { 0..n / 2 } else { n / 2..n }
}

/// Shares of [server's number > client's] and [server's = client's] on the bits of each strand; what a strand does not
/// ask is empty. `mine` are this party's numbers.
pub(super) fn run_strands(party: &mut Party, mine: &[u64], strands: &[Strand]) -> Result<Vec<(Bits, Bits)>> {
    let (n, me) = (mine.len(), party.role);
    let steps = strands.iter().map(Strand::transfers).max().unwrap_or(0);
    let count = |step: usize| strands.iter().filter(|strand| step < strand.transfers()).count();
    let drawn = |answerer: Role| (0..steps).map(|s| half_answered_by(answerer, s, n).len() * count(s)).sum::<usize>();
    let (mut pads, mut random) = (Wiped::with_capacity(drawn(me)), Wiped::with_capacity(drawn(me.other())));
    // Both parties fetch in the same order, the transfers in which the client answers first. The directions take turns, so
    // that a party that is done with its part of one batch begins with the next.
    for start in (0..drawn(me).max(drawn(me.other()))).step_by(BATCH) {
        for answerer in [Role::Client, Role::Server] {
            let wanted = BATCH.min(drawn(answerer).saturating_sub(start));
            if answerer == me {
                draw_answers(party, wanted, &mut pads)?;
            } else {
                draw_choices(party, wanted, &mut random)?;
            }
        }
    }

    let (mut pads, mut random) = (pads.as_slice(), random.as_slice());
    let mut running: Vec<Running> = strands.iter().map(|strand| Running::begin(strand, me, mine)).collect();
    // What the peer chose for the step that I answer next, and what I chose for the step that it answers next.
    let (mut chosen, mut waiting): (Option<Reader>, &[u8]) = (None, &[]);
    for round in 0..=steps {
        // In one half I answer the last step and choose for the next, in the other the peer does.
        let (my_half, its_half) = (half_answered_by(me.other(), round, n), half_answered_by(me, round, n));
        let last = round.checked_sub(1);
        let answer_bits = last.map_or(0, |step| strands.iter().map(|strand| strand.answer_bits(step) as usize).sum());
        let message_bits = |half: &Range<usize>| half.len() * (answer_bits + 4 * count(round));

        let mut body = Writer::with_capacity(message_bits(&my_half));
        if let (Some(mut choices), Some(step)) = (chosen.take(), last) {
            for strand in running.iter_mut().filter(|running| running.has(step)) {
                strand.answer(step, my_half.clone(), take(&mut pads, my_half.len()), &mut choices, &mut body);
            }
            choices.finish(&mut party.channel)?;
        }
        let fresh = take(&mut random, my_half.len() * count(round));
        let mut unused = fresh;
        for strand in running.iter().filter(|running| running.has(round)) {
            strand.choose(round, my_half.clone(), take(&mut unused, my_half.len()), &mut body);
        }
        party.channel.send(Kind::Transfers, &body.finish())?;

        let mut body = Reader::receive(&mut party.channel, Kind::Transfers, message_bits(&its_half).div_ceil(8))?;
        if let Some(step) = last {
            for strand in running.iter_mut().filter(|running| running.has(step)) {
                strand.learn(step, its_half.clone(), take(&mut waiting, its_half.len()), &mut body);
            }
        }
        if round < steps {
            chosen = Some(body);
        } else {
            body.finish(&mut party.channel)?;
        }
        waiting = fresh;
    }
    Ok(running.into_iter().map(Running::found).collect())
}

/// Cuts the first `n` values off.
fn take<'a, T>(values: &mut &'a [T], n: usize) -> &'a [T] {
    let (first, rest) = values.split_at(n);
    *values = rest;
    first
}

/// A strand on its way, with this party's shares of what it has found so far.
struct Running<'a> {
    strand: &'a Strand,
    me: Role,
    mine: &'a [u64],
    state: Bits,
    /// What [`Asks::Both`] adds up beside the state.
    greater: Bits,
}

impl<'a> Running<'a> {
    fn begin(strand: &'a Strand, me: Role, mine: &'a [u64]) -> Self {
        let n = mine.len();
        Self { strand, me, mine, state: vec![0; n], greater: vec![0; if strand.two() { n } else { 0 }] }
    }

    fn has(&self, step: usize) -> bool {
        step < self.strand.transfers()
    }

    /// Shares of [a > b] and [a = b].
    fn found(self) -> (Bits, Bits) {
        match self.strand.asks {
            Asks::Greater => (self.state, Bits::new()),
            Asks::Equal => (Bits::new(), self.state),
            Asks::Both => (self.greater, self.state),
        }
    }

    /// Puts what this party chooses in one step.
    fn choose(&self, step: usize, half: Range<usize>, random: &[u8], body: &mut Writer) {
        for ((&number, &state), &r) in self.mine[half.clone()].iter().zip(&self.state[half]).zip(random) {
            body.put(u64::from(self.strand.place(step, number, state) ^ u32::from(r & 15)), 4);
        }
    }

    /// Puts the answers to what the peer has chosen in one step. This party's own shares are what masks them.
    fn answer(&mut self, step: usize, half: Range<usize>, pads: &[u32], choices: &mut Reader, body: &mut Writer) {
        let strand = self.strand;
        let answers = strand.places(step) - 1;
        let mask = (1u32 << answers) - 1;
        for (i, &pads) in half.zip(pads) {
            let truth = strand.truth(step, self.me, strand.digit(step, self.mine[i]), self.state[i]);
            let covered = truth ^ permuted(pads, choices.take(4) as u32);
            let (first, second) = (covered & 1, (covered >> 16) & 1);
            let relative = covered ^ (first * 0xffff) ^ (second * 0xffff_0000);
            let low = u64::from((relative >> 1) & mask);
            if strand.two() {
                body.put(low | u64::from((relative >> 17) & mask) << answers, 2 * answers);
                self.greater[i] ^= first as u8;
                self.state[i] = second as u8;
            } else {
                body.put(low, answers);
                self.state[i] = first as u8;
            }
        }
    }

    /// Takes the answers to what this party has chosen in one step.
    fn learn(&mut self, step: usize, half: Range<usize>, random: &[u8], body: &mut Reader) {
        let strand = self.strand;
        let answers = strand.places(step) - 1;
        let mask = (1u64 << answers) - 1;
        for (i, &r) in half.zip(random) {
            let place = strand.place(step, self.mine[i], self.state[i]);
            // Answer 0 is not sent: a zero is put in its place.
            let at_place = |answers: u64| ((answers << 1 >> place) & 1) as u8;
            if strand.two() {
                let answer = body.take(2 * answers);
                self.greater[i] ^= at_place(answer & mask) ^ ((r >> 4) & 1);
                self.state[i] = at_place(answer >> answers) ^ ((r >> 5) & 1);
            } else {
                self.state[i] = at_place(body.take(answers)) ^ ((r >> 4) & 1);
            }
        }
    }
}

/// Of the sixteen pads of a transfer, two bits each: bits 0 in the low half of a word, bits 1 in the high half.
fn draw_answers(party: &mut Party, wanted: usize, out: &mut Wiped<u32>) -> Result<()> {
    let batch = Wiped::from(party.ot.send16(&mut party.channel, wanted)?);
    same_length("a supply of transfers", wanted, batch.len())?;
    out.extend(batch.iter().map(pad_planes));
    Ok(())
}

/// The random choice in the low four bits, two bits of the pad above.
fn draw_choices(party: &mut Party, wanted: usize, out: &mut Wiped<u8>) -> Result<()> {
    let batch = party.ot.receive16(&mut party.channel, wanted)?;
    let (choices, pads) = (Wiped::from(batch.choices), Wiped::from(batch.pads));
    same_length("a supply of transfers", wanted, choices.len().min(pads.len()))?;
    out.extend(choices.iter().zip(pads.iter()).map(|(&c, &p)| (c & 15) | (p & 3) << 4));
    Ok(())
}

/// Bit 0 of each of sixteen bytes in the low half, bit 1 in the high half.
#[inline(always)]
fn pad_planes(pads: &[u8; 16]) -> u32 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let all = u128::from_le_bytes(*pads);
    let (a, b) = (all as u64, (all >> 64) as u64);
    let plane = |shift: u32| u32::from(gather((a >> shift) & ONES)) | u32::from(gather((b >> shift) & ONES)) << 8;
    plane(0) | plane(1) << 16
}

/// Both halves with bit j moved to j XOR e. e has been on the wire.
#[inline(always)]
fn permuted(planes: u32, e: u32) -> u32 {
    let mut w = planes;
    for (step, low) in [(1, 0x5555_5555u32), (2, 0x3333_3333), (4, 0x0f0f_0f0f), (8, 0x00ff_00ff)] {
        let swapped = ((w >> step) & low) | (w & low) << step;
        let mask = (u32::from(e & step != 0)).wrapping_neg();
        w ^= mask & (w ^ swapped);
    }
    w
}
