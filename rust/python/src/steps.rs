//! Values in and out, and every step that is not a product: one method each.

use crate::convert::{bits, field, flags, signed, vector, words};
use crate::error::raise;
use crate::party::Party;
use cloister_core::protocol::{self, NormPlan, Rows};
use cloister_core::{Error, Role};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

fn role(name: &str) -> PyResult<Role> {
    match name {
        "client" => Ok(Role::Client),
        "server" => Ok(Role::Server),
        other => Err(raise(Error::BadArgument(format!("there is no role {other:?}; client and server are the roles")))),
    }
}

/// Values in and out.
#[pymethods]
impl Party {
    /// Shares of the owner's signed integers; the other party passes None and their number.
    #[pyo3(signature = (owner, values, n))]
    fn share<'py>(
        &self,
        py: Python<'py>,
        owner: &str,
        values: Option<PyBuffer<i64>>,
        n: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let owner = role(owner)?;
        let values = values.map(|v| vector(py, &v)).transpose()?;
        let out = self.run(py, |engine| protocol::share_from(&mut engine.party, owner, values.as_deref(), n))?;
        words(py, &out)
    }

    /// Opens values to one party: this reveals them to it. The other gets None.
    fn reveal_to<'py>(&self, py: Python<'py>, to: &str, x: PyBuffer<u64>) -> PyResult<Option<Bound<'py, PyByteArray>>> {
        let (to, x) = (role(to)?, field(py, &x)?);
        let out = self.run(py, |engine| protocol::reveal_to(&mut engine.party, to, &x))?;
        out.map(|values| signed(py, &values)).transpose()
    }

    /// Opens values to both parties.
    fn reveal_to_both<'py>(&self, py: Python<'py>, x: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let out = self.run(py, |engine| protocol::reveal_to_both(&mut engine.party, &x))?;
        signed(py, &out)
    }
}

/// Bits and order.
#[pymethods]
impl Party {
    /// [x < y], of which `kappa` bits above `drop_bits` are compared.
    fn less_than<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        y: PyBuffer<u64>,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let (x, y) = (field(py, &x)?, field(py, &y)?);
        let out = self.run(py, |engine| protocol::less_than(&mut engine.party, &x, &y, kappa, drop_bits))?;
        Ok(flags(py, &out))
    }

    /// [x < 0].
    fn is_negative<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let out = self.run(py, |engine| protocol::is_negative(&mut engine.party, &x, kappa, drop_bits))?;
        Ok(flags(py, &out))
    }

    /// [x = y].
    fn equal<'py>(&self, py: Python<'py>, x: PyBuffer<u64>, y: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let (x, y) = (field(py, &x)?, field(py, &y)?);
        let out = self.run(py, |engine| protocol::equal(&mut engine.party, &x, &y))?;
        Ok(flags(py, &out))
    }

    /// a and b.
    fn bits_and<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, b: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, b) = (bits(py, &a)?, bits(py, &b)?);
        let out = self.run(py, |engine| protocol::and(&mut engine.party, &a, &b))?;
        Ok(flags(py, &out))
    }

    /// a or b.
    fn bits_or<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, b: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, b) = (bits(py, &a)?, bits(py, &b)?);
        let out = self.run(py, |engine| protocol::or(&mut engine.party, &a, &b))?;
        Ok(flags(py, &out))
    }

    /// not a.
    fn bits_not<'py>(&self, py: Python<'py>, a: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let a = bits(py, &a)?;
        let out = self.run(py, |engine| Ok(protocol::not(&engine.party, &a)))?;
        Ok(flags(py, &out))
    }

    /// Bits as the numbers 0 and 1.
    fn bits_to_field<'py>(&self, py: Python<'py>, a: PyBuffer<u8>) -> PyResult<Bound<'py, PyByteArray>> {
        let a = bits(py, &a)?;
        let out = self.run(py, |engine| protocol::bits_to_field(&mut engine.party, &a))?;
        words(py, &out)
    }

    /// x where the bit is 1, else 0.
    fn select<'py>(&self, py: Python<'py>, a: PyBuffer<u8>, x: PyBuffer<u64>) -> PyResult<Bound<'py, PyByteArray>> {
        let (a, x) = (bits(py, &a)?, field(py, &x)?);
        let out = self.run(py, |engine| protocol::select(&mut engine.party, &a, &x))?;
        words(py, &out)
    }

    /// The largest of each row.
    fn maximum<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out = self.run(py, |engine| protocol::maximum(&mut engine.party, &x, rows))?;
        words(py, &out)
    }

    /// [value is among the k largest of its row].
    fn top_k_mask<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        k: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out = self.run(py, |engine| protocol::top_k_mask(&mut engine.party, &x, rows, k, &engine.link.clone()))?;
        Ok(flags(py, &out))
    }

    /// The rank of each value in its row, 0 the largest.
    fn rank<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out = self.run(py, |engine| protocol::rank(&mut engine.party, &x, rows))?;
        words(py, &out)
    }

    /// ([x = 0], ..., [x = width - 1]) for each value.
    fn one_hot<'py>(&self, py: Python<'py>, x: PyBuffer<u64>, width: usize) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let out = self.run(py, |engine| protocol::one_hot_values(&mut engine.party, &x, width))?;
        Ok(flags(py, &out))
    }

    /// For each row the 0/1 matrix (slots x length) that picks its largest values in order.
    fn dispatch_ranks<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        length: usize,
        slots: usize,
        kappa: u32,
        drop_bits: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let rows = Rows { length, kappa, drop_bits };
        let out =
            self.run(py, |engine| protocol::dispatch_ranks(&mut engine.party, &x, rows, slots, &engine.link.clone()))?;
        words(py, &out)
    }
}

/// A method for a step of one vector of values.
macro_rules! value_steps {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[pymethods]
        impl Party {
            $(#[$doc])*
            fn $name<'py>(&self, py: Python<'py>, x: PyBuffer<u64>, $($arg: $kind),*) -> PyResult<Bound<'py, PyByteArray>> {
                let x = field(py, &x)?;
                let out = self.run(py, move |engine| protocol::$name(&mut engine.party, &x, $($arg),*))?;
                words(py, &out)
            }
        }
    )* };
}

value_steps! {
    /// x / 2^f, off by at most one last place.
    truncate(f: u32);
    /// x * x, at twice the scale.
    square();
    /// max(x, 0).
    relu(f: u32);
    /// x times its logistic.
    silu(f: u32);
    /// x times the normal distribution function.
    gelu(f: u32);
    /// e^x at 2^g, for x at 2^f up to octaves * ln 2.
    exponential(f: u32, octaves: u32, g: u32);
    /// 2^total / x for 2^least <= x < 2^most.
    reciprocal(least: u32, most: u32, total: u32);
    /// numerator * 2^(total - 16) / sqrt(x) for 2^least <= x < 2^most.
    rsqrt(least: u32, most: u32, numerator: u32, total: u32);
}

/// Whole rows.
#[pymethods]
impl Party {
    /// Softmax of rows; `allowed` are public flags.
    #[pyo3(signature = (x, columns, allowed, f))]
    fn softmax<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        columns: usize,
        allowed: Option<PyBuffer<u8>>,
        f: u32,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let allowed: Option<Vec<bool>> =
            allowed.map(|a| bits(py, &a)).transpose()?.map(|a| a.into_iter().map(|bit| bit == 1).collect());
        let out = self.run(py, |engine| protocol::softmax(&mut engine.party, &x, columns, allowed.as_deref(), f))?;
        words(py, &out)
    }

    /// RMSNorm, or LayerNorm if the mean is taken off first, without weights; epsilon in units of 2^-24.
    fn norm<'py>(
        &self,
        py: Python<'py>,
        x: PyBuffer<u64>,
        columns: usize,
        f: u32,
        rms_bits: u32,
        epsilon: u32,
        centred: bool,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let x = field(py, &x)?;
        let plan = NormPlan { columns, f, rms_bits, epsilon };
        let out = self.run(py, |engine| {
            if centred {
                protocol::layer_norm(&mut engine.party, &x, &plan)
            } else {
                protocol::rms_norm(&mut engine.party, &x, &plan)
            }
        })?;
        words(py, &out)
    }
}

/// A method for a step of two vectors of values.
macro_rules! pair_steps {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[pymethods]
        impl Party {
            $(#[$doc])*
            fn $name<'py>(
                &self,
                py: Python<'py>,
                x: PyBuffer<u64>,
                y: PyBuffer<u64>,
                $($arg: $kind),*
            ) -> PyResult<Bound<'py, PyByteArray>> {
                let (x, y) = (field(py, &x)?, field(py, &y)?);
                let out = self.run(py, move |engine| protocol::$name(&mut engine.party, &x, &y, $($arg),*))?;
                words(py, &out)
            }
        }
    )* };
}

pair_steps! {
    /// x * y, at the sum of the scales.
    multiply();
    /// x * y / 2^f, off by at most one last place.
    multiply_truncate(f: u32);
    /// Sums of `length` products each.
    inner_products(length: usize);
}
