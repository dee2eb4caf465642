//! [`Layer`]: a linear layer whose weight is FP8 codes that are multiplied, as operators find it by its number.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, RwLock};

use lowp_format::{AnyRecipe, Shape};
use lowp_gemm::OperandPtr;
use lowp_kernels::Cuda;
use pyo3::prelude::*;

use super::products::{Side, WORKSPACE, WorkMemory, backend, multiply};
use super::torch::{Holds, Tensor, torch};
use crate::casts::Encode;
use crate::error::Error;
use crate::locks::{lock, read, write};
use crate::recent::Recent;
use crate::recipe::Recipe;
use crate::scales::Scales;

/// Casts that stay planned.
const CASTS: usize = 4096;
/// What addresses of operands are multiples of.
const ALIGNED: usize = 256;

/// What inputs or gradients are cast to.
#[derive(Debug)]
pub(crate) struct Operand {
    number: i64,
    recipe: AnyRecipe,
    holds: Holds,
    scales: Scales,
}

/// Codes of both directions, each row-major, and their scales: one for all, or those of rowwise codes and then those of columnwise ones.
pub(crate) struct Cast {
    pub(crate) rowwise: Tensor,
    pub(crate) columnwise: Tensor,
    pub(crate) scale: Tensor,
}

/// The codes of a weight in one direction.
#[derive(Debug)]
struct Held {
    codes: Tensor,
    scale: Tensor,
    /// Whether they are those of the phase that the weight is used in.
    is_current: bool,
    /// Whether they were made for one product.
    once: bool,
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
    /// Takes the codes of one direction, for one product (`once`) or until they are forgotten.
    ///
    /// # Errors
    /// There are fewer scales than a product of these codes reads.
    pub(crate) fn hold(
        &self,
        columnwise: bool,
        codes: Tensor,
        scale: Tensor,
        once: bool,
    ) -> Result<(), Error> {
        let [rows, cols] = self.sides;
        self.scales.check(
            &scale,
            0,
            if columnwise {
                [cols, rows]
            } else {
                [rows, cols]
            },
        )?;
        let held = Held {
            codes,
            scale,
            is_current: true,
            once,
        };
        let before = lock(&self.held)[usize::from(columnwise)].replace(held);
        drop(before);
        Ok(())
    }

    /// Where the codes of one direction lie, and their scale; and what a single product is to keep until it is enqueued.
    fn codes(&self, columnwise: bool) -> Result<(OperandPtr, Option<Held>), Error> {
        if let Some(found) = self.known_codes(columnwise)? {
            return Ok(found);
        }
        prepare(self.number, Some(columnwise))?;
        self.known_codes(columnwise)?.ok_or_else(|| {
            Error::new(
                "the memory of a weight is gone; FSDP2 frees gathered parameters after the forward and the backward of their module",
            )
        })
    }

    fn known_codes(&self, columnwise: bool) -> Result<Option<(OperandPtr, Option<Held>)>, Error> {
        let mut both = lock(&self.held);
        let held = &mut both[usize::from(columnwise)];
        let Some(found) = held.as_ref().filter(|held| held.is_current) else {
            return Ok(None);
        };
        if found.codes.is_freed()? || found.scale.is_freed()? {
            return Ok(None);
        }
        let ptr = OperandPtr {
            data: found.codes.address()?,
            scale: found.scale.address()?,
        };
        let kept = if found.once { held.take() } else { None };
        Ok(Some((ptr, kept)))
    }

    /// The output for rows of input.
    pub(crate) fn forward(&self, input: Tensor, bias: Option<Tensor>) -> Result<Forward, Error> {
        let (torch, input) = (torch()?, input.contiguous()?);
        let (dtype, device, [rows, cols]) = (input.holds()?, input.device()?, input.sides()?);
        let (columnwise, scale) = self.input.kept([rows, cols], device)?;
        let memory = torch.empty(&[WORKSPACE + rows * cols], Holds::Bytes, device)?;
        let workspace = memory.address()?;
        let rowwise = workspace + WORKSPACE as u64;
        let addresses = [rowwise, columnwise.address()?, scale.address()?];
        let [side, _] = cast_to(&input, &self.input, addresses)?;
        let place = WorkMemory {
            device,
            address: workspace,
        };
        let output = self.multiply(false, side, dtype, bias, place)?;
        Ok(Forward {
            output,
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
        let place = WorkMemory {
            device,
            address: workspace,
        };
        let none = || torch.empty(&[0], dtype, device);
        let of_input = if needs[0] {
            self.multiply(true, rowwise, dtype, None, place)?
        } else {
            none()?
        };
        let of_weight = if needs[1] {
            let input = Side::columnwise(saved, self.input.scales)?;
            let ([_, depth], [_, given]) = (columnwise.sides, input.sides);
            if given != depth {
                return Err(Error::new(format!(
                    "the gradient of a layer has {depth} rows and its input had {given}"
                )));
            }
            multiply([columnwise, input], dtype, None, false, place)?
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
        bias: Option<Tensor>,
    ) -> Result<Tensor, Error> {
        let device = codes.device()?;
        let memory = torch()?.empty(&[WORKSPACE], Holds::Bytes, device)?;
        let side = Side::rowwise([codes, scale], self.input.scales)?;
        let place = WorkMemory {
            device,
            address: memory.address()?,
        };
        self.multiply(false, side, dtype, bias, place)
    }

    /// The product of codes of rows with those of the weight: with rowwise ones for the output, else for the gradient of the input.
    fn multiply(
        &self,
        columnwise: bool,
        left: Side,
        dtype: Holds,
        bias: Option<Tensor>,
        memory: WorkMemory,
    ) -> Result<Tensor, Error> {
        let (weight, _kept) = self.codes(columnwise)?;
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
        multiply([left, right], dtype, bias, !columnwise, memory)
    }
}

/// The result of a layer's forward.
pub(crate) struct Forward {
    pub(crate) output: Tensor,
    /// Columnwise codes of the input, which the gradient of the weight needs, and their scales.
    pub(crate) codes: Tensor,
    pub(crate) scale: Tensor,
}

/// Where a cast reads and writes, and what it is.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    operand: i64,
    device: i32,
    stream: u64,
    sides: [usize; 2],
    is_f32: bool,
    addresses: [u64; 5],
}

impl Operand {
    /// Memory for columnwise codes of values, and for their scales of both directions.
    fn kept(&self, [rows, cols]: [usize; 2], device: i32) -> Result<(Tensor, Tensor), Error> {
        let torch = torch()?;
        let columnwise = torch.empty(&[cols, rows], self.holds, device)?;
        let both = [self.scales.both(rows, cols)];
        let sides: &[usize] = if self.scales.is_one() { &[] } else { &both };
        Ok((columnwise, torch.empty(sides, Holds::F32, device)?))
    }
}

/// Values as codes of both directions.
pub(crate) fn cast(values: Tensor, operand: &Operand) -> Result<Cast, Error> {
    let values = values.contiguous()?;
    let (sides, device) = (values.sides()?, values.device()?);
    let (columnwise, scale) = operand.kept(sides, device)?;
    let made = Cast {
        rowwise: torch()?.empty(&sides, operand.holds, device)?,
        columnwise,
        scale,
    };
    let all = [&made.rowwise, &made.columnwise, &made.scale];
    let [rowwise, columnwise, scale] = all.map(Tensor::address);
    cast_to(&values, operand, [rowwise?, columnwise?, scale?])?;
    Ok(made)
}

/// Contiguous values as codes of both directions, which go to `rowwise` and `columnwise`, and their scales to `scale`.
fn cast_to(
    values: &Tensor,
    operand: &Operand,
    [rowwise, columnwise, scale]: [u64; 3],
) -> Result<[Side; 2], Error> {
    static PLANNED: LazyLock<Mutex<Recent<Key, Arc<Encode<Cuda>>>>> =
        LazyLock::new(|| Mutex::new(Recent::new(CASTS)));
    let torch = torch()?;
    let ([rows, cols], device, holds) = (values.sides()?, values.device()?, values.holds()?);
    let (dtype, width) = match holds {
        Holds::F32 => ("float32", 4),
        Holds::Bf16 => ("bfloat16", 2),
        _ => {
            return Err(Error::new(
                "values of a layer that are neither bfloat16 nor float32; cast them",
            ));
        }
    };
    let scales = operand.scales;
    let [of_rows, of_columns] = [scales.count(rows, cols), scales.count(cols, rows)];
    let of_columnwise = scale + (size_of::<f32>() * scales.begin(rows, cols)) as u64;
    let addresses = [values.address()?, rowwise, columnwise, scale, of_columnwise];
    let stream = torch.stream(device)?;
    let key = Key {
        operand: operand.number,
        device,
        stream,
        sides: [rows, cols],
        is_f32: width == 4,
        addresses,
    };
    let known = lock(&PLANNED).get(&key).cloned();
    let planned = match known {
        Some(planned) => planned,
        None => {
            let memory =
                |index: usize, bytes: usize| (addresses[index], bytes, i64::from(device), None);
            let codes = [
                ("rowwise_data", rows * cols),
                ("columnwise_data", rows * cols),
            ];
            let of_codes: &[_] = match scales.is_one() {
                true => &[("tensor_scale", 4)],
                false => &[
                    ("rowwise_scale_inv", 4 * of_rows),
                    ("columnwise_scale_inv", 4 * of_columns),
                ],
            };
            let buffers = codes
                .iter()
                .chain(of_codes)
                .copied()
                .zip(1..)
                .map(|((name, bytes), index)| (name.to_owned(), memory(index, bytes)));
            let encode = Encode::new(
                &backend(device, stream)?,
                operand.recipe,
                Shape::new(rows, cols),
                memory(0, rows * cols * width),
                dtype,
                buffers.collect(),
            )?;
            let planned = Arc::new(encode);
            let gone = lock(&PLANNED).put(key, Arc::clone(&planned));
            drop(gone);
            planned
        }
    };
    planned.run()?;
    let side = |sides, data, scale| Side {
        sides,
        ptr: OperandPtr { data, scale },
        holds: operand.holds,
        scales,
    };
    Ok([
        side([rows, cols], rowwise, scale),
        side([cols, rows], columnwise, of_columnwise),
    ])
}
