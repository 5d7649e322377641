//! How one product is laid out in ciphertexts, and what it costs: the lanes, the split of a weight polynomial into
//! columns and outputs, and the level, chosen from public facts alone so that both parties arrive at the same plan.

use crate::error::{Error, Result};
use crate::rlwe::{AnswerPlan, LEVELS, N, SeededCiphertext, params};

/// Bytes of encrypted input that a server holds at a time, unless a cost model says otherwise.
const MEMORY: usize = 1 << 30;

/// The sizes of one product, (rows x columns) times (columns x outputs).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Rows of the encrypted matrix: tokens.
    pub rows: usize,
    /// Columns of the encrypted matrix, rows of the weights.
    pub columns: usize,
    /// Columns of the weights.
    pub outputs: usize,
}

/// What the two parties can spend. Public, and the same at both: the plan follows from it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostModel {
    /// Bits a second that the link carries.
    pub link_bits_per_second: f64,
    /// Cores that work for both parties together.
    pub cores: f64,
    /// Bytes of encrypted input that the server may hold at a time.
    pub memory: usize,
}

impl Default for CostModel {
    /// A local network of 3 Gbit/s, two cores, one gibibyte.
    fn default() -> Self {
        Self { link_bits_per_second: 3e9, cores: 2.0, memory: MEMORY }
    }
}

impl CostModel {
    /// Multiply-adds a second and core of the inner loop, transforms of a whole polynomial, ciphertexts finished:
    /// measured on a Skylake server core at 2.5 GHz. Only their ratios matter.
    const MULTIPLY_ADDS: f64 = 8e9;
    const TRANSFORM_SECONDS: f64 = 25e-6;
    const ANSWER_SECONDS: f64 = 600e-6;
}

/// One layout of one product.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Plan {
    /// The sizes.
    pub(super) shape: Shape,
    /// Weights lie in [-2^(weight_bits - 1), 2^(weight_bits - 1)).
    pub(super) weight_bits: u32,
    /// Tokens in one ciphertext, a power of two: a polynomial is the sum of X^k x_k(X^lanes).
    pub(super) lanes: usize,
    /// Columns in one ciphertext.
    pub(super) block: usize,
    /// Outputs in one answer. `block * spread <= N / lanes`.
    pub(super) spread: usize,
    /// Primes of a request.
    pub(super) level: usize,
}

impl Plan {
    /// The cheapest plan of a shape under a cost model.
    pub fn new(shape: Shape, weight_bits: u32, cost: &CostModel) -> Result<Self> {
        let Shape { rows, columns, outputs } = shape;
        if rows == 0 || columns == 0 || outputs == 0 {
            return Err(Error::BadArgument("a product needs at least one row, column and output".into()));
        }
        if rows > 1 << 20 || columns > 1 << 20 || outputs > 1 << 20 {
            return Err(Error::Unsupported("a product of more than 2^20 rows, columns or outputs".into()));
        }
        if !(1..=42).contains(&weight_bits) {
            return Err(Error::Unsupported(format!("weights of {weight_bits} bits")));
        }
        let mut best: Option<(f64, Plan)> = None;
        let mut lanes = 1;
        while lanes <= N {
            let room = N / lanes;
            let mut block = 1;
            while block <= room {
                let spread = (room / block).min(outputs);
                if let Some(plan) = Self::at_lowest_level(Plan { shape, weight_bits, lanes, block, spread, level: 0 }) {
                    let seconds = plan.seconds(cost)?;
                    if plan.memory() <= cost.memory && best.is_none_or(|(least, _)| seconds < least) {
                        best = Some((seconds, plan));
                    }
                }
                block = next_block(block, room.min(columns));
            }
            if lanes >= rows {
                break;
            }
            lanes *= 2;
        }
        best.map(|(_, plan)| plan).ok_or_else(|| {
            Error::Unsupported(format!(
                "a product of {rows} x {columns} x {outputs} with weights of {weight_bits} bits within {} bytes",
                cost.memory
            ))
        })
    }

    /// Sets the lowest level whose noise bound holds. A level whose modulus is no larger than p holds nothing.
    fn at_lowest_level(mut self) -> Option<Self> {
        (2..=LEVELS).find_map(|level| {
            self.level = level;
            self.answer_plan().ok().map(|_| self)
        })
    }

    /// How an answer is hidden and how wide it travels; refused where the noise bound does not hold.
    ///
    /// Error: noise and the roundings of the switch stay below 1/2, and each party rounds its own part, so the sum of
    /// the two shares is the product or that plus or minus 1.
    pub fn answer_plan(&self) -> Result<AnswerPlan> {
        AnswerPlan::coefficients(&params::Shape {
            level: self.level,
            products: self.inputs(),
            nonzero: self.block * self.spread,
            magnitude: (f64::from(self.weight_bits) - 1.0).exp2(),
            rotations: 0,
        })
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bits of a weight, sign included.
    pub fn weight_bits(&self) -> u32 {
        self.weight_bits
    }

    /// Coefficients of one token's polynomial, and of a weight polynomial.
    pub(super) fn room(&self) -> usize {
        N / self.lanes
    }

    /// Groups of rows, each with ciphertexts of its own.
    pub fn tiles(&self) -> usize {
        self.shape.rows.div_ceil(self.lanes)
    }

    /// Rows of one tile; the last may have fewer than the others.
    pub fn rows_of(&self, tile: usize) -> usize {
        self.lanes.min(self.shape.rows - tile * self.lanes)
    }

    /// Request ciphertexts of one tile.
    pub fn inputs(&self) -> usize {
        self.shape.columns.div_ceil(self.block)
    }

    /// Answer ciphertexts of one tile.
    pub fn answers(&self) -> usize {
        self.shape.outputs.div_ceil(self.spread)
    }

    /// Outputs of one answer; the last may have fewer than the others.
    pub fn outputs_of(&self, answer: usize) -> usize {
        self.spread.min(self.shape.outputs - answer * self.spread)
    }

    /// Bytes of encrypted input that the server holds during one tile.
    pub fn memory(&self) -> usize {
        self.inputs() * 2 * self.level * N * size_of::<u32>()
    }

    /// Coefficients of the first polynomial of an answer that travel, token by token within output by output.
    pub(super) fn wanted(&self, tile: usize, answer: usize) -> Vec<u32> {
        let rows = self.rows_of(tile);
        (0..self.outputs_of(answer))
            .flat_map(|output| {
                let at = self.lanes * (output * self.block + self.block - 1);
                (at..at + rows).map(|k| k as u32)
            })
            .collect()
    }

    /// Bytes of the client's messages, frame headers left out.
    pub fn bytes_up(&self) -> usize {
        self.tiles() * self.inputs() * SeededCiphertext::wire_len(self.level)
    }

    /// Bytes of the server's messages, frame headers left out; at most so many.
    pub fn bytes_down(&self) -> Result<usize> {
        let plan = self.answer_plan()?;
        let useful = plan.answer_len(N) - plan.answer_len(0);
        let c0 = (self.shape.rows * self.shape.outputs).div_ceil(N) * useful;
        Ok(self.tiles() * self.answers() * (plan.answer_len(0) + 1) + c0)
    }

    /// The predicted seconds: the link and the cores, one after the other.
    pub fn seconds(&self, cost: &CostModel) -> Result<f64> {
        let (tiles, inputs, answers) = (self.tiles() as f64, self.inputs() as f64, self.answers() as f64);
        let level = self.level as f64;
        let link = 8.0 * (self.bytes_up() + self.bytes_down()?) as f64 / cost.link_bits_per_second;
        let products = tiles * inputs * answers * 2.0 * level * N as f64 / CostModel::MULTIPLY_ADDS;
        let weights = tiles * inputs * answers * level * CostModel::TRANSFORM_SECONDS / self.lanes as f64;
        let requests = tiles * inputs * 4.0 * level * CostModel::TRANSFORM_SECONDS;
        let finish = tiles * answers * CostModel::ANSWER_SECONDS;
        Ok(link + (products + weights + requests + finish) / cost.cores)
    }
}

/// The next candidate: every number up to 32, then steps of an eighth of a power of two, and the largest itself.
fn next_block(block: usize, largest: usize) -> usize {
    let step = (block.next_power_of_two() / 32).max(1);
    match block + step {
        _ if block >= largest => usize::MAX,
        next => next.min(largest),
    }
}
