//! Welch's t over two classes of runs, with croppings.

use crate::operations::Operation;
use std::time::Instant;

/// What was seen of one operation.
pub struct Seen {
    /// Runs of both classes together.
    pub runs: usize,
    /// Seconds of a run.
    pub median: f64,
    /// The largest |t| of all croppings.
    pub t: f64,
}

/// Parts of the runs that are kept, the slowest cut off: interruptions are long and hide what is small.
const KEPT: [f64; 6] = [1.0, 0.99, 0.95, 0.9, 0.75, 0.5];
/// Runs of a cropping that have to be left in either class.
const LEAST: usize = 20;

/// A cheap generator for the order of the classes.
struct Order(u64);

impl Order {
    fn bit(&mut self) -> bool {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 40 & 1 == 1
    }
}

/// Runs an operation for some seconds.
pub fn measure(operation: &mut Operation, seconds: f64) -> Seen {
    let mut order = Order(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id()));
    for _ in 0..10 {
        operation.timed(order.bit());
    }
    let begun = Instant::now();
    let mut all: Vec<(f64, bool)> = Vec::new();
    while begun.elapsed().as_secs_f64() < seconds || all.len() < 200 {
        let fixed = order.bit();
        all.push((operation.timed(fixed), fixed));
    }
    let mut sorted: Vec<f64> = all.iter().map(|&(time, _)| time).collect();
    sorted.sort_by(f64::total_cmp);
    let t = KEPT.map(|part| {
        let most = sorted[((sorted.len() - 1) as f64 * part) as usize];
        let class = |fixed| all.iter().filter(move |run| run.1 == fixed && run.0 <= most).map(|run| run.0);
        welch(class(true), class(false))
    });
    Seen { runs: all.len(), median: sorted[sorted.len() / 2], t: t.into_iter().fold(0.0, f64::max) }
}

/// |t| of the difference of two means; 0 if there is too little to say.
fn welch(a: impl Iterator<Item = f64> + Clone, b: impl Iterator<Item = f64> + Clone) -> f64 {
    let moments = |values: &dyn Fn() -> Vec<f64>| {
        let values = values();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        (n, mean, values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0))
    };
    let ((n, mean_a, var_a), (m, mean_b, var_b)) = (moments(&|| a.clone().collect()), moments(&|| b.clone().collect()));
    if n < LEAST as f64 || m < LEAST as f64 { 0.0 } else { (mean_a - mean_b).abs() / (var_a / n + var_b / m).sqrt() }
}
