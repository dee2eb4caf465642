//! [`Layer`]: a linear layer whose weight is FP8 codes that are multiplied, as operators find it by its number.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, RwLock};

use lowp_format::AnyRecipe;
use lowp_gemm::OperandPtr;
use pyo3::prelude::*;

use super::casts::cast_to;
use super::products::{Side, WORKSPACE, WorkMemory, multiply};
use super::torch::{Holds, Tensor, torch};
use crate::error::Error;
use crate::locks::{lock, read, write};
use crate::recipe::Recipe;
use crate::scales::Scales;

/// What addresses of operands are multiples of.
const ALIGNED: usize = 256;

/// What inputs or gradients are cast to.
#[derive(Debug)]
pub(crate) struct Operand {
    pub(super) number: i64,
    pub(super) recipe: AnyRecipe,
    pub(super) holds: Holds,
    pub(super) scales: Scales,
}

/// The codes of a weight in one direction.
#[derive(Debug)]
struct Held {
    codes: Tensor,
    scale: Tensor,
    /// The GPU of both.
    device: i32,
    /// Whether they are those of the phase that the weight is used in.
    is_current: bool,
}

/// A layer by its number, and whether codes are columnwise.
type Direction = (i64, bool);

thread_local! {
    /// Codes that were made for one product of this thread. Other threads use the same layer.
    static ONCE: RefCell<Option<(Direction, Held)>> = const { RefCell::new(None) };
}

impl Held {
    /// Where they lie, on a device; `None` where their memory was freed.
    fn operand(&self, device: i32) -> Result<Option<OperandPtr>, Error> {
        if self.device != device {
            return Err(Error::new(format!(
                "an operand of a layer is on GPU {device} and its weight is on GPU {}; move both to one device",
                self.device
            )));
        }
        if self.codes.is_freed()? || self.scale.is_freed()? {
            return Ok(None);
        }
        Ok(Some(OperandPtr {
            data: self.codes.address()?,
            scale: self.scale.address()?,
        }))
    }
}

/// A layer.
#[derive(Debug)]
pub(crate) struct Layer {
    number: i64,
    /// Rows and columns of the weight.
    sides: [usize; 2],
    input: Arc<Operand>,
    gradient: Arc<Operand>,
    /// Elements of rowwise and of columnwise codes.
    holds: [Holds; 2],
    /// What the scales of the weight belong to.
    scales: Scales,
    held: Mutex<[Option<Held>; 2]>,
}

type ByNumber<T> = LazyLock<RwLock<HashMap<i64, Arc<T>>>>;

static LAYERS: ByNumber<Layer> = LazyLock::new(RwLock::default);
static OPERANDS: ByNumber<Operand> = LazyLock::new(RwLock::default);
/// Has Python give the codes of a layer.
static PREPARE: OnceLock<Py<PyAny>> = OnceLock::new();

pub(crate) fn set_prepare(prepare: Py<PyAny>) {
    let _known = PREPARE.set(prepare);
}

/// What inputs or gradients are cast to, by its number.
pub(crate) fn operand(number: i64) -> Result<Arc<Operand>, Error> {
    let found = read(&OPERANDS).get(&number).map(Arc::clone);
    found.ok_or_else(|| {
        Error::new(format!(
            "operand {number} of a compiled graph is not known; compile the model again"
        ))
    })
}

/// A layer by its number, which Python describes when it is used first.
pub(crate) fn layer(number: i64) -> Result<Arc<Layer>, Error> {
    if let Some(layer) = read(&LAYERS).get(&number) {
        return Ok(Arc::clone(layer));
    }
    prepare(number, None)?;
    let found = read(&LAYERS).get(&number).map(Arc::clone);
    found.ok_or_else(|| Error::new(format!("layer {number} is not known")))
}

/// Has Python describe a layer, and give the codes of one direction.
fn prepare(number: i64, columnwise: Option<bool>) -> Result<(), Error> {
    Python::attach(|py| match PREPARE.get() {
        Some(prepare) => Ok(prepare.call1(py, (number, columnwise)).map(drop)?),
        None => Ok(()),
    })
}

fn holds(element: &str) -> Result<Holds, Error> {
    match element {
        "E4M3" => Ok(Holds::E4M3),
        "E5M2" => Ok(Holds::E5M2),
        other => Err(Error::new(format!(
            "codes of {other}; products of layers take E4M3 and E5M2"
        ))),
    }
}

/// Makes a recipe of inputs or gradients known by a number.
#[pyfunction]
pub(crate) fn describe_operand(
    number: i64,
    recipe: &Recipe,
    element: &str,
    scales: &str,
) -> Result<(), Error> {
    let operand = Operand {
        number,
        recipe: recipe.recipe,
        holds: holds(element)?,
        scales: Scales::of(scales)?,
    };
    let before = write(&OPERANDS).insert(number, Arc::new(operand));
    drop(before);
    Ok(())
}

/// Makes a layer known by a number: rows and columns of the weight, the numbers of what its inputs and gradients are cast to, the elements of
/// its rowwise and columnwise codes, and what their scales belong to.
#[pyfunction]
pub(crate) fn describe_layer(
    number: i64,
    sides: [usize; 2],
    operands: [i64; 2],
    elements: [String; 2],
    scales: &str,
) -> Result<(), Error> {
    let [input, gradient] = [operand(operands[0])?, operand(operands[1])?];
    let holds = [holds(&elements[0])?, holds(&elements[1])?];
    let layer = Layer {
        number,
        sides,
        input,
        gradient,
        holds,
        scales: Scales::of(scales)?,
        held: Mutex::default(),
    };
    let before = write(&LAYERS).insert(number, Arc::new(layer));
    drop(before);
    Ok(())
}

/// The codes of a layer are those of another phase from here on, or lie elsewhere: the next use asks Python.
#[pyfunction]
pub(crate) fn forget_codes(number: i64) {
    let layer = read(&LAYERS).get(&number).map(Arc::clone);
    if let Some(layer) = layer {
        for held in lock(&layer.held).iter_mut().flatten() {
            held.is_current = false;
        }
    }
}

/// The weight of a layer is gone.
#[pyfunction]
pub(crate) fn release_layer(number: i64) {
    let gone = write(&LAYERS).remove(&number);
    drop(gone);
}

impl Layer {
    /// Takes the codes of one direction, for one product of this thread (`once`) or until they are forgotten.
    ///
    /// # Errors
    /// They are not codes of the weight, or there are fewer scales than a product of them reads.
    pub(crate) fn hold(
        &self,
        columnwise: bool,
        codes: Tensor,
        scale: Tensor,
        once: bool,
    ) -> Result<(), Error> {
        let [mut outer, mut depth] = self.sides;
        if columnwise {
            (outer, depth) = (depth, outer);
        }
        let device = codes.device()?;
        let side = Side::of([&codes, &scale], self.scales, 0, device)?;
        let holds = self.holds[usize::from(columnwise)];
        if side.sides != [outer, depth] || side.holds != holds {
            return Err(Error::new(format!(
                "codes of {:?} in {:?} for a weight whose product reads {outer}x{depth} in {holds:?}",
                side.sides, side.holds
            )));
        }
        let held = Held {
            codes,
            scale,
            device,
            is_current: true,
        };
        let slot = usize::from(columnwise);
        if once {
            let unused = ONCE.replace(Some(((self.number, columnwise), held)));
            let forgotten = lock(&self.held)[slot].take_if(|held| !held.is_current);
            drop((unused, forgotten));
        } else {
            let before = lock(&self.held)[slot].replace(held);
            drop(before);
        }
        Ok(())
    }

    /// Where the codes of one direction lie, and their scale; and what a single product is to keep until it is enqueued.
    fn codes(&self, columnwise: bool, device: i32) -> Result<(OperandPtr, Option<Held>), Error> {
        if let Some(found) = self.known_codes(columnwise, device)? {
            return Ok((found, None));
        }
        prepare(self.number, Some(columnwise))?;
        let once = ONCE.take();
        let once = once.filter(|(direction, _)| *direction == (self.number, columnwise));
        let once = once.map(|(_, held)| held);
        let found = match &once {
            Some(held) => held.operand(device)?,
            None => self.known_codes(columnwise, device)?,
        };
        let found = found.ok_or_else(|| {
            Error::new(
                "the memory of a weight is gone; FSDP2 frees gathered parameters after the forward and the backward of their module",
            )
        })?;
        Ok((found, once))
    }

    fn known_codes(&self, columnwise: bool, device: i32) -> Result<Option<OperandPtr>, Error> {
        let both = lock(&self.held);
        let held = both[usize::from(columnwise)].as_ref();
        match held.filter(|held| held.is_current) {
            Some(held) => held.operand(device),
            None => Ok(None),
        }
    }

    /// The output for rows of input.
    pub(crate) fn forward(&self, input: Tensor, bias: Option<&Tensor>) -> Result<Forward, Error> {
        let (torch, input) = (torch()?, input.contiguous()?);
        let (dtype, device, [rows, cols]) = (input.holds()?, input.device()?, input.sides()?);
        let (columnwise, scale) = self.input.kept([rows, cols], device)?;
        let memory = torch.empty(&[WORKSPACE + rows * cols], Holds::Bytes, device)?;
        let workspace = memory.address()?;
        let rowwise = workspace + WORKSPACE as u64;
        let addresses = [rowwise, columnwise.address()?, scale.address()?];
        let [side, _] = cast_to(&input, &self.input, addresses)?;
        let work = WorkMemory {
            device,
            address: workspace,
        };
        Ok(Forward {
            output: self.multiply(false, side, dtype, bias, work)?,
            codes: columnwise,
            scale,
        })
    }

    /// The gradients of the input and of the weight that are needed; tensors without values for the others. `saved` are codes of the input.
    pub(crate) fn backward(
        &self,
        grad: Tensor,
        saved: [&Tensor; 2],
        needs: [bool; 2],
    ) -> Result<[Tensor; 2], Error> {
        let (torch, grad) = (torch()?, grad.contiguous()?);
        let (dtype, device, [rows, cols]) = (grad.holds()?, grad.device()?, grad.sides()?);
        // One allocation for all that ends with this call.
        let codes = (rows * cols).next_multiple_of(ALIGNED);
        let scales = size_of::<f32>() * self.gradient.scales.both(rows, cols);
        let memory = torch.empty(&[WORKSPACE + 2 * codes + scales], Holds::Bytes, device)?;
        let workspace = memory.address()?;
        let at = |bytes: usize| workspace + (WORKSPACE + bytes) as u64;
        let [rowwise, columnwise] =
            cast_to(&grad, &self.gradient, [at(0), at(codes), at(2 * codes)])?;
        let work = WorkMemory {
            device,
            address: workspace,
        };
        let none = || torch.empty(&[0], dtype, device);
        let of_input = if needs[0] {
            self.multiply(true, rowwise, dtype, None, work)?
        } else {
            none()?
        };
        let of_weight = if needs[1] {
            let input = Side::columnwise(saved, self.input.scales, device)?;
            let ([_, depth], [_, given]) = (columnwise.sides, input.sides);
            if given != depth {
                return Err(Error::new(format!(
                    "the gradient of a layer has {depth} rows and its input had {given}"
                )));
            }
            multiply([columnwise, input], dtype, None, false, work)?
        } else {
            none()?
        };
        Ok([of_input, of_weight])
    }

    /// The output for codes of an input.
    pub(crate) fn forward_of(
        &self,
        [codes, scale]: [&Tensor; 2],
        dtype: Holds,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, Error> {
        let device = codes.device()?;
        let memory = torch()?.empty(&[WORKSPACE], Holds::Bytes, device)?;
        let side = Side::of([codes, scale], self.input.scales, 0, device)?;
        let work = WorkMemory {
            device,
            address: memory.address()?,
        };
        self.multiply(false, side, dtype, bias, work)
    }

    /// The product of codes of rows with those of the weight: with rowwise ones for the output, else for the gradient of the input.
    fn multiply(
        &self,
        columnwise: bool,
        left: Side,
        dtype: Holds,
        bias: Option<&Tensor>,
        work: WorkMemory,
    ) -> Result<Tensor, Error> {
        let (weight, _kept) = self.codes(columnwise, work.device)?;
        let [mut width, mut depth] = self.sides;
        if columnwise {
            (width, depth) = (depth, width);
        }
        let [_, given] = left.sides;
        if given != depth {
            return Err(Error::new(format!(
                "an operand of a layer has {given} columns and the weight needs {depth}"
            )));
        }
        let right = Side {
            sides: [width, depth],
            ptr: weight,
            holds: self.holds[usize::from(columnwise)],
            scales: self.scales,
        };
        multiply([left, right], dtype, bias, !columnwise, work)
    }
}

/// The result of a layer's forward.
pub(crate) struct Forward {
    pub(crate) output: Tensor,
    /// Columnwise codes of the input, which the gradient of the weight needs, and their scales.
    pub(crate) codes: Tensor,
    pub(crate) scale: Tensor,
}
