//! The operators as PyTorch calls them: arguments and results by their places in its stack.

#![expect(unsafe_code, reason = "reads and writes the stack that PyTorch gives")]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use super::casts;
use super::layers::{self, Layer};
use super::torch::{Holds, Kernel, Tensor, load, torch};
use crate::error::Error;
use crate::place::Current;

thread_local! {
    /// The error that ended the last operator that failed: C++ exceptions carry its text alone.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// The arguments and results of a call.
struct Stack(*mut u64);

impl Stack {
    /// An argument that is no tensor.
    fn number(&self, index: usize) -> i64 {
        // SAFETY: PyTorch gives as many as the schema has.
        unsafe { *self.0.add(index) }.cast_signed()
    }

    fn is_set(&self, index: usize) -> bool {
        self.number(index) & 0xff != 0
    }

    /// A tensor, which is taken once.
    fn tensor(&self, index: usize) -> Tensor {
        // SAFETY: the schema has a tensor there, and each kernel below takes it once.
        unsafe { Tensor::of_argument(*self.0.add(index)) }
    }

    /// The number of the layer that a token is of.
    fn layer(&self, index: usize) -> Result<Arc<Layer>, Error> {
        layers::layer(self.tensor(index).token()?)
    }

    /// Results take the places of the arguments.
    fn give<const N: usize>(&self, results: [Tensor; N]) {
        for (index, result) in results.into_iter().enumerate() {
            // SAFETY: there is room for the arguments or the results, whichever are more.
            unsafe { *self.0.add(index) = result.into_result() };
        }
    }
}

/// Runs a kernel. What it fails with is a C++ exception.
fn enter(stack: *mut u64, kernel: impl FnOnce(&Stack) -> Result<(), Error>) {
    RAISED.set(None);
    let done = catch_unwind(AssertUnwindSafe(|| {
        let _current = Current::keep_on_gpu();
        kernel(&Stack(stack))
    }));
    let error = match done {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error,
        Err(_) => Error::new("an operator of lowp panicked; its message is on stderr"),
    };
    let text = error.to_string();
    RAISED.set(Some(error.into()));
    if let Ok(torch) = torch() {
        torch.throw(&text);
    }
}

/// `hold(int layer, bool columnwise, Tensor codes, Tensor scale, bool once) -> ()`
unsafe extern "C-unwind" fn hold(stack: *mut u64, _: u64, _: u64) {
    enter(stack, |stack| {
        let (codes, scale) = (stack.tensor(2), stack.tensor(3));
        let layer = layers::layer(stack.number(0))?;
        layer.hold(stack.is_set(1), codes, scale, stack.is_set(4))
    });
}

/// `cast(Tensor values, int operand) -> (Tensor, Tensor, Tensor)`
unsafe extern "C-unwind" fn cast(stack: *mut u64, _: u64, _: u64) {
    enter(stack, |stack| {
        let values = stack.tensor(0);
        let operand = layers::operand(stack.number(1))?;
        let cast = casts::cast(values, &operand)?;
        stack.give([cast.rowwise, cast.columnwise, cast.scale]);
        Ok(())
    });
}

/// `multiply(Tensor codes, Tensor scale, Tensor token, int width, bool wide, Tensor bias, bool biased) -> Tensor`
unsafe extern "C-unwind" fn multiply(stack: *mut u64, _: u64, _: u64) {
    enter(stack, |stack| {
        let (codes, scale, bias) = (stack.tensor(0), stack.tensor(1), stack.tensor(5));
        let layer = stack.layer(2)?;
        let bias = stack.is_set(6).then_some(&bias);
        let dtype = if stack.is_set(4) {
            Holds::F32
        } else {
            Holds::Bf16
        };
        stack.give([layer.forward_of([&codes, &scale], dtype, bias)?]);
        Ok(())
    });
}

/// `forward(Tensor input, Tensor token, int width, Tensor bias, bool biased) -> (Tensor, Tensor, Tensor)`
unsafe extern "C-unwind" fn forward(stack: *mut u64, _: u64, _: u64) {
    enter(stack, |stack| {
        let (input, bias) = (stack.tensor(0), stack.tensor(3));
        let layer = stack.layer(1)?;
        let bias = stack.is_set(4).then_some(&bias);
        let forward = layer.forward(input, bias)?;
        stack.give([forward.output, forward.codes, forward.scale]);
        Ok(())
    });
}

/// `backward(Tensor grad, Tensor codes, Tensor scale, Tensor token, int width, bool of_input, bool of_weight) -> (Tensor, Tensor)`
unsafe extern "C-unwind" fn backward(stack: *mut u64, _: u64, _: u64) {
    enter(stack, |stack| {
        let (grad, codes, scale) = (stack.tensor(0), stack.tensor(1), stack.tensor(2));
        let layer = stack.layer(3)?;
        let needs = [stack.is_set(5), stack.is_set(6)];
        stack.give(layer.backward(grad, [&codes, &scale], needs)?);
        Ok(())
    });
}

/// Registers the operators for tensors on GPUs. `folder` has PyTorch's libraries; `prepare(layer, columnwise)` gives the codes of a layer
/// to `hold`. Their schemas are defined in Python. Fails where this version of PyTorch lacks a function.
#[pyfunction]
pub(crate) fn register_operators(folder: PathBuf, prepare: Py<PyAny>) -> Result<(), Error> {
    let torch = load(&folder)?;
    layers::set_prepare(prepare);
    let kernels: [(_, Kernel); 4] = [
        (c"cast", cast),
        (c"multiply", multiply),
        (c"forward", forward),
        (c"backward", backward),
    ];
    torch.register(c"hold", c"CompositeExplicitAutograd", hold)?;
    kernels
        .into_iter()
        .try_for_each(|(name, kernel)| torch.register(name, c"CUDA", kernel))
}

/// The error that ended the last operator that failed on this thread.
#[pyfunction]
pub(crate) fn take_error() -> Option<PyErr> {
    RAISED.take()
}
