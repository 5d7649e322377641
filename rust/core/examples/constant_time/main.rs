//! Does the time depend on secrets? Two answers for one list of operations.
//!
//! * *Statistics* (the method of dudect, ePrint 2016/1123): each operation runs on two classes of secrets, one fixed at an
//!   extreme and one random, in random order; Welch's t over many runs, also with the slowest runs cut off. Below 4.5
//!   nothing was seen; above 10 something is there.
//!   `cargo run --release --features insecure-test-dealer --example constant_time -- [seconds each] [part of a name]`
//! * *Memcheck* (the method of ctgrind): secrets are marked undefined, and valgrind reports every branch and every
//!   address that depends on one. Valgrind knows no AVX-512, so it sees the AVX2 variants.
//!   `valgrind --suppressions=rust/core/examples/constant_time/rejection.supp target/release/examples/constant_time`
//!
//! The last operation compares with an early end, on purpose: a method that does not see it sees nothing.

mod operations;
mod statistics;
mod valgrind;

fn main() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let seconds: f64 = given.iter().find_map(|a| a.parse().ok()).unwrap_or(5.0);
    let part = given.iter().find(|a| a.parse::<f64>().is_err()).map_or("", String::as_str);
    let operations = operations::all().into_iter().map(|make| make()).filter(|o| o.name.contains(part));
    if valgrind::is_here() {
        for mut operation in operations {
            let before = valgrind::errors();
            operation.once_undefined();
            let found = valgrind::errors() - before;
            println!(
                "{:<44} {}",
                operation.name,
                if found == 0 { "no report".into() } else { format!("{found} REPORTS") }
            );
        }
    } else {
        println!("{:<44} {:>8} {:>12} {:>8}", "operation", "runs", "median, us", "max |t|");
        for mut operation in operations {
            let seen = statistics::measure(&mut operation, seconds);
            println!("{:<44} {:>8} {:>12.1} {:>8.2}", operation.name, seen.runs, seen.median * 1e6, seen.t);
        }
    }
}
