//! Casts of inputs and gradients of layers to FP8 codes, planned once for each set of addresses.

use std::sync::{Arc, LazyLock, Mutex};

use lowp_format::Shape;
use lowp_gemm::OperandPtr;
use lowp_kernels::Cuda;

use super::layers::Operand;
use super::products::{Side, backend};
use super::torch::{Holds, Tensor, torch};
use crate::casts::Encode;
use crate::error::Error;
use crate::locks::lock;
use crate::recent::Recent;

/// Casts that stay planned.
const CASTS: usize = 4096;

/// Codes of both directions, each row-major, and their scales: one for all, or those of rowwise codes and then those of columnwise ones.
pub(crate) struct Cast {
    pub(crate) rowwise: Tensor,
    pub(crate) columnwise: Tensor,
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
    pub(super) fn kept(
        &self,
        [rows, cols]: [usize; 2],
        device: i32,
    ) -> Result<(Tensor, Tensor), Error> {
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
pub(super) fn cast_to(
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
