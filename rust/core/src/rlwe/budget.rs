//! How much of the flood's hiding the answers of one session have used.
//!
//! A flooded answer is not perfectly hidden: the bound of [`AnswerPlan::slots`] says how far its distribution can be from
//! one without the product's noise. Squared distances add up over answers, so each costs a fixed part of a budget, and
//! when the budget is spent the whole session is at a statistical distance of 2^-40. A narrow product costs much less
//! of it than a wide one.
//!
//! Both parties keep the same book, because the plans are public: the server counts in [`super::finish_slots`], the
//! client in [`SecretKey::open_slots`](super::SecretKey::open_slots), and both ask [`HidingBudget::check`] before a step
//! begins, so a session that must end ends at both before a byte moves. A new key of the *same* session would buy
//! nothing: what the flood protects is the weights, and the distance grows with all that a client was ever answered,
//! with the square root of the number of its sessions. That is for whoever admits clients to count.

use super::params::AnswerPlan;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// The book of one key. See the module.
#[derive(Default)]
pub struct HidingBudget {
    used: AtomicU64,
}

impl HidingBudget {
    /// log2 of the whole, in the parts that [`AnswerPlan::hiding_cost`] counts.
    pub const WHOLE_LOG2: i32 = 60;
    const WHOLE: u64 = 1 << Self::WHOLE_LOG2;

    /// Refuses what would not fit any more: `answers` answers in slots of this plan.
    pub fn check(&self, plan: &AnswerPlan, answers: usize) -> Result<()> {
        let wanted = u128::from(plan.hiding_cost()) * answers as u128;
        if u128::from(self.used.load(Ordering::Relaxed)) + wanted > u128::from(Self::WHOLE) {
            return Err(Error::HidingUsedUp { answers });
        }
        Ok(())
    }

    /// Counts one answer.
    pub(super) fn spend(&self, plan: &AnswerPlan) -> Result<()> {
        let add = |used: u64| used.checked_add(plan.hiding_cost()).filter(|&sum| sum <= Self::WHOLE);
        let spent = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        spent.map(|_| ()).map_err(|_| Error::HidingUsedUp { answers: 1 })
    }

    /// The part that is used, from 0 to 1. The distance is the square root of it, times 2^-40.
    pub fn used(&self) -> f64 {
        self.used.load(Ordering::Relaxed) as f64 / Self::WHOLE as f64
    }

    /// Leaves room for so many answers of this plan and no more.
    #[cfg(test)]
    pub(crate) fn leave(&self, plan: &AnswerPlan, answers: usize) {
        self.used.store(Self::WHOLE - plan.hiding_cost() * answers as u64, Ordering::Relaxed);
    }
}
