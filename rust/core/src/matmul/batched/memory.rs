//! How much memory a batched product takes: what both parties may count on, held by a counting allocator in the tests.
//!
//! Neither bound contains the arguments, the session's keys, and what waits in the link, which has limits of its own.

use super::evaluate::{ROWS_READ, TERMS_AT_A_TIME, WEIGHT_MEMORY, lanes};
use super::{IN_FLIGHT, REQUESTS_IN_MESSAGE};
use crate::matmul::kernel::{LANES, ROWS, TERMS_TOGETHER, TILE};
use crate::matmul::kernel_transform::SIDE;
use crate::matmul::layout::Layout;
use crate::matmul::plan::BatchedPlan;
use crate::rlwe::{LEVELS, N, SeededCiphertext};

/// Rows of the kernel that are worked on together where they fit: every value that is read serves so many.
const ROWS_TOGETHER: usize = 96;
/// Bytes of sums and weights that one thread should hold at most. Narrow tokens fill few of the kernel's lanes, so there a
/// row takes more, and fewer are worked on together.
const THREAD_MEMORY: usize = 128 << 20;
/// Bytes of a whole ciphertext, and of a polynomial modulo p.
const CIPHERTEXT: usize = 2 * LEVELS * N * 4;
const POLYNOMIAL: usize = N * 8;

/// Bytes of one input ciphertext in the order of the kernel.
pub(in crate::matmul) fn value_bytes(layout: &Layout) -> usize {
    LEVELS * layout.cosets() * lanes(layout) * 4
}

/// Bytes of the sums of eight rows.
fn panel_bytes(layout: &Layout) -> usize {
    LEVELS * layout.cosets() * (lanes(layout) / LANES) * TILE * 4
}

/// Bytes of the transformed weights of eight rows and one input ciphertext.
fn weight_bytes(layout: &Layout) -> usize {
    LEVELS * layout.cosets() * ROWS * 4
}

/// Output ciphertexts that are computed together.
pub(super) fn outputs_together(layout: &Layout) -> usize {
    let panels = THREAD_MEMORY / (panel_bytes(layout) + TERMS_TOGETHER * weight_bytes(layout));
    ((panels * ROWS).min(ROWS_TOGETHER) / layout.shifts().len()).max(1)
}

/// Input ciphertexts that one pass of the kernel takes over so many panels.
pub(super) fn terms_at_a_time(layout: &Layout, panels: usize) -> usize {
    let in_memory = WEIGHT_MEMORY / (panels * weight_bytes(layout));
    (in_memory / TERMS_TOGETHER * TERMS_TOGETHER).clamp(TERMS_TOGETHER, TERMS_AT_A_TIME)
}

impl BatchedPlan {
    /// Bytes that the server holds at most, its results included, with so many threads.
    pub fn server_memory(&self, threads: usize) -> usize {
        let (layout, answer) = (self.layout(), self.answer().answer_len(N));
        let (shifts, points, outputs) = (layout.shifts().len(), layout.cosets(), self.outputs_in_part());
        let (inputs, all) = (self.segments()[0].len(), self.outputs_of_group());
        let values = inputs * value_bytes(layout);
        // Lists of slots and offsets, which may have grown by doubling, and the tables of the transforms.
        let tables = shifts * points * (96 + 32 * self.shape().columns_out.len()) + points * 160;
        // A message as it grows, then its ciphertexts; each thread expands one and adds a share.
        let message = REQUESTS_IN_MESSAGE * (2 * SeededCiphertext::wire_len(LEVELS) + CIPHERTEXT);
        let reading = message + threads * 4 * CIPHERTEXT;
        let panels = (outputs * shifts).div_ceil(ROWS);
        let terms = terms_at_a_time(layout, panels).min(inputs.next_multiple_of(TERMS_TOGETHER));
        let sums = panels * (panel_bytes(layout) + terms * weight_bytes(layout));
        let polynomials = (TERMS_TOGETHER + 1) * points * SIDE * 8 + (panels * ROWS + LANES) * terms * 8;
        let hiding = (ROWS_READ.max(shifts).min(outputs * shifts) + shifts + 6) * CIPHERTEXT;
        let finished = (IN_FLIGHT * threads * outputs).min(all) * (answer + POLYNOMIAL);
        let busy = threads.min(all.div_ceil(outputs));
        self.results() + values + tables + reading.max(busy * (sums + polynomials + hiding) + finished)
    }

    /// Bytes that the client holds at most, its results included, with so many threads.
    pub fn client_memory(&self, threads: usize) -> usize {
        let asking = REQUESTS_IN_MESSAGE * 2 * SeededCiphertext::wire_len(LEVELS) + threads * 2 * CIPHERTEXT;
        let message = self.outputs_in_part() * (2 * self.answer().answer_len(N) + POLYNOMIAL);
        self.results() + asking.max(message + threads * 2 * CIPHERTEXT)
    }

    /// Output ciphertexts of one message.
    fn outputs_in_part(&self) -> usize {
        outputs_together(self.layout()).min(self.outputs_of_group())
    }

    fn outputs_of_group(&self) -> usize {
        (0..self.shape().columns_out.len()).map(|m| self.outputs(m)).sum()
    }

    fn results(&self) -> usize {
        (0..self.shape().columns_out.len()).map(|m| self.shape().outputs(m) * 8).sum()
    }
}
