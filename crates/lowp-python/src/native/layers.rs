//! [`Layer`]: a linear layer whose weight is FP8 codes that are multiplied, as operators find it by its number.

#![expect(unsafe_code, reason = "passes on addresses of PyTorch")]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, RwLock};

use lowp_format::AnyRecipe;
use lowp_gemm::{CublasLt, Dtype, Epilogue, GemmDesc, OperandDesc, OperandPtr, Scalars, Workspace};
use lowp_kernels::Cuda;
use pyo3::prelude::*;

use super::torch::{Holds, Tensor, torch};
use crate::casts::Encode;
use crate::error::Error;
use crate::locks::{lock, read, write};
use crate::place;
use crate::recent::Recent;
use crate::recipe::Recipe;
use crate::scales::Scales;

/// Casts that stay planned.
const CASTS: usize = 4096;
/// Bytes that a product works in: as many as PyTorch gives its own on a Hopper, taken from PyTorch for each product.
const WORKSPACE: usize = 32 << 20;
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

    /// The output for rows of input, and the columnwise codes of the input and the scales, which the gradient of the weight needs.
    pub(crate) fn forward(
        &self,
        input: Tensor,
        bias: Option<Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor), Error> {
        let (torch, input) = (torch()?, input.contiguous()?);
        let (dtype, device, [rows, cols]) = (input.holds()?, input.device()?, input.sides()?);
        let (columnwise, scale) = self.input.kept([rows, cols], device)?;
        let memory = torch.empty(&[WORKSPACE + rows * cols], Holds::Bytes, device)?;
        let workspace = memory.address()?;
        let rowwise = workspace + WORKSPACE as u64;
        let addresses = [rowwise, columnwise.address()?, scale.address()?];
        let [side, _] = cast_to(&input, &self.input, addresses)?;
        let out = self.multiply(false, side, dtype, bias, (device, workspace))?;
        Ok((out, columnwise, scale))
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
        let place = (device, workspace);
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
        self.multiply(false, side, dtype, bias, (device, memory.address()?))
    }

    /// The product of codes of rows with those of the weight: with rowwise ones for the output, else for the gradient of the input.
    fn multiply(
        &self,
        columnwise: bool,
        left: Side,
        dtype: Holds,
        bias: Option<Tensor>,
        place: (i32, u64),
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
        multiply([left, right], dtype, bias, !columnwise, place)
    }
}

/// One operand of a product: codes whose inner axis is contracted.
struct Side {
    /// Rows and columns of the codes.
    sides: [usize; 2],
    ptr: OperandPtr,
    holds: Holds,
    scales: Scales,
}

impl Scales {
    /// Whether `scale` has, from `begin` on, those of codes of `outer` rows that are contracted over `depth`.
    fn check(self, scale: &Tensor, begin: usize, [outer, depth]: [usize; 2]) -> Result<(), Error> {
        let (found, needed) = (scale.entries()?, begin + self.count(outer, depth));
        match found >= needed {
            true => Ok(()),
            false => Err(Error::new(format!(
                "{found} scales for codes of {outer}x{depth}; their product reads {needed}"
            ))),
        }
    }
}

impl Side {
    fn rowwise([codes, scale]: [&Tensor; 2], scales: Scales) -> Result<Self, Error> {
        Self::of([codes, scale], scales, 0)
    }

    /// The codes have the sides of the transpose.
    fn columnwise([codes, scale]: [&Tensor; 2], scales: Scales) -> Result<Self, Error> {
        let [cols, rows] = codes.sides()?;
        Self::of([codes, scale], scales, scales.begin(rows, cols))
    }

    fn of([codes, scale]: [&Tensor; 2], scales: Scales, begin: usize) -> Result<Self, Error> {
        let sides = codes.sides()?;
        scales.check(scale, begin, sides)?;
        let ptr = OperandPtr {
            data: codes.address()?,
            scale: scale.address()? + (size_of::<f32>() * begin) as u64,
        };
        Ok(Self {
            sides,
            ptr,
            holds: codes.holds()?,
            scales,
        })
    }
}

fn dtype_of(holds: Holds) -> Result<Dtype, Error> {
    match holds {
        Holds::E4M3 => Ok(Dtype::E4M3),
        Holds::E5M2 => Ok(Dtype::E5M2),
        Holds::Bf16 => Ok(Dtype::Bf16),
        Holds::F32 => Ok(Dtype::F32),
        Holds::Bytes => Err(Error::new(
            "an operand of a product holds bytes; it takes codes of FP8",
        )),
    }
}

/// `left @ right.T`, as `Products` multiplies, on a device in its memory of `WORKSPACE` bytes.
fn multiply(
    [left, right]: [Side; 2],
    dtype: Holds,
    bias: Option<Tensor>,
    fast: bool,
    (device, workspace): (i32, u64),
) -> Result<Tensor, Error> {
    let ([rows, depth], [cols, _]) = (left.sides, right.sides);
    let sides = [rows, cols, depth];
    let torch = torch()?;
    let plain = |side: &Side| {
        Ok::<_, Error>(OperandDesc {
            scale: side.scales.0,
            ..OperandDesc::plain(dtype_of(side.holds)?, true)
        })
    };
    let desc = GemmDesc {
        epilogue: if bias.is_some() {
            Epilogue::Bias
        } else {
            Epilogue::None
        },
        // Sums of scaled groups are in f32 alone.
        fast_accum: fast && left.scales.is_one() && right.scales.is_one(),
        ..GemmDesc::new(sides, [plain(&left)?, plain(&right)?], dtype_of(dtype)?)
    };
    let out = torch.empty(&sides[..2], dtype, device)?;
    let workspace = Workspace::foreign(workspace, WORKSPACE);
    let bias = bias.map_or(Ok(0), |bias| bias.bias(sides[1], device))?;
    let products = products(device, torch.stream(device)?)?;
    // SAFETY: addresses are those of contiguous tensors of these shapes on this device; PyTorch reuses memory of a stream after the work of
    // that stream.
    unsafe {
        products.run(
            &desc,
            [left.ptr, right.ptr],
            out.address()?,
            bias,
            Scalars::ONE,
            &workspace,
        )
    }?;
    Ok(out)
}

fn backend(device: i32, stream: u64) -> Result<Cuda, Error> {
    place::cuda(usize::try_from(device).unwrap_or(0), stream)
}

/// By device and stream.
type ByStream = HashMap<(i32, u64), Arc<CublasLt>>;

/// The products of a stream.
fn products(device: i32, stream: u64) -> Result<Arc<CublasLt>, Error> {
    static PRODUCTS: LazyLock<Mutex<ByStream>> = LazyLock::new(Mutex::default);
    if let Some(known) = lock(&PRODUCTS).get(&(device, stream)) {
        return Ok(Arc::clone(known));
    }
    let made = Arc::new(CublasLt::new(&backend(device, stream)?)?);
    Ok(Arc::clone(
        lock(&PRODUCTS).entry((device, stream)).or_insert(made),
    ))
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
            let source = (memory(0, rows * cols * width), dtype);
            let encode = Encode::new(
                &backend(device, stream)?,
                operand.recipe,
                (rows, cols),
                source,
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
