//! [`CublasLt`]: products by cuBLASLt, each planned once.

#![expect(unsafe_code, reason = "calls cuBLASLt")]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::take;
use std::ptr::{from_ref, null};
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use lowp_kernels::{Cuda, KernelError};

use crate::call::{Call, Matrix};
use crate::desc::{Dtype, Epilogue, GemmDesc, OperandDesc, Scalars, ScaleMode};
use crate::operand::OperandPtr;
use crate::owned::Owned;
use crate::{GemmError, Workspace};

type Handle<T> = Owned<T, CublasError>;

/// Products that are kept: batches of many sizes would add to them without end.
const MOST: usize = 4096;

fn dtype(of: Dtype) -> sys::cudaDataType_t {
    match of {
        Dtype::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        Dtype::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Dtype::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        Dtype::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
        Dtype::E2M1 => sys::cudaDataType_t::CUDA_R_4F_E2M1,
    }
}

/// The mode that cuBLASLt gets. Without one it expects one scale for a tensor, and versions before 12.8 know nothing else.
fn scale_mode(of: ScaleMode) -> Option<sys::cublasLtMatmulMatrixScale_t> {
    use sys::cublasLtMatmulMatrixScale_t as Mode;
    match of {
        ScaleMode::None | ScaleMode::Tensor => None,
        ScaleMode::Rows => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F),
        ScaleMode::Vec128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F),
        ScaleMode::Square128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F),
        ScaleMode::Vec32 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0),
        ScaleMode::Vec16 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3),
    }
}

/// The products of a stream. They hold no memory of the device.
#[derive(Debug)]
pub struct CublasLt {
    cuda: Cuda,
    handle: Handle<sys::cublasLtHandle_t>,
    /// How kernels may add up what they split along `k`, beside those that split nothing.
    reductions: sys::cublasLtReductionScheme_t,
    /// By what they are, by whether scalars are on the device, by what addresses are multiples of, and by the bytes that they work in.
    planned: Mutex<HashMap<(GemmDesc, bool, u32, usize), Planned>>,
}

// SAFETY: the handle may be used by any thread; what is planned is used under a lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// cuBLASLt's descriptions of a product ([`Call`]).
#[derive(Debug)]
struct Planned {
    desc: Handle<sys::cublasLtMatmulDesc_t>,
    /// Of A, B, and the result.
    layouts: [Handle<sys::cublasLtMatrixLayout_t>; 3],
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

impl CublasLt {
    /// No products yet.
    ///
    /// # Errors
    /// No cuBLASLt.
    pub fn new(cuda: &Cuda) -> Result<Self, GemmError> {
        // SAFETY: loads the library, which has no precondition. Without this question cudarc would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(GemmError::NoCublas);
        }
        let handle = cuda.foreign_work(
            || (),
            |_| {
                let made = lt::create_handle().map_err(failed("cublasLtCreate"))?;
                // SAFETY: made once, destroyed once, by the function for it.
                Ok::<_, KernelError>(unsafe { Owned::new(made, lt::destroy_handle) })
            },
        )?;
        Ok(Self {
            cuda: cuda.clone(),
            handle,
            reductions: sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_MASK,
            planned: Mutex::default(),
        })
    }

    /// Chooses among kernels that add up in f32 what they split along `k`. Others round the sum of each part to the type of the result first.
    #[must_use]
    pub fn with_f32_sums(mut self) -> Self {
        self.reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        self
    }

    /// Gives the stream `out = alpha * left * right + beta * out`, with `bias` added to each row where the epilogue says so. Sums are f32.
    ///
    /// # Errors
    /// cuBLASLt has no kernel for the product, or failed.
    ///
    /// # Safety
    /// Addresses are those of matrices as `desc` has them, in memory of the device that is not freed before work that
    /// the stream has by now, and so is a workspace of another library; of a product that is captured, not before its graph, and so are scalars on the device.
    pub unsafe fn run(
        &self,
        desc: &GemmDesc,
        operands: [OperandPtr; 2],
        out: u64,
        bias: u64,
        scalars: Scalars,
        workspace: &Workspace,
    ) -> Result<(), GemmError> {
        // SAFETY: the caller's promise; the result is added to itself.
        unsafe { self.run_adding(desc, operands, out, out, bias, scalars, workspace) }
    }

    /// Gives the stream `out = alpha * left * right + beta * addend`, as [`CublasLt::run`]. The addend has the layout of the result.
    ///
    /// # Errors
    /// As [`CublasLt::run`].
    ///
    /// # Safety
    /// As [`CublasLt::run`], of the addend, too.
    #[expect(clippy::too_many_arguments, reason = "the arguments of cublasLtMatmul")]
    pub unsafe fn run_adding(
        &self,
        desc: &GemmDesc,
        [left, right]: [OperandPtr; 2],
        addend: u64,
        out: u64,
        bias: u64,
        scalars: Scalars,
        workspace: &Workspace,
    ) -> Result<(), GemmError> {
        let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let [alpha, beta]: [*const c_void; 2] = match &scalars {
            Scalars::Host { alpha, beta } => [from_ref(alpha).cast(), from_ref(beta).cast()],
            Scalars::Device { alpha, beta } => [*alpha as *const c_void, *beta as *const c_void],
        };
        // cuBLASLt takes a bias to be aligned as the result is.
        let alignment = alignment([left.data, right.data, addend | out | bias]);
        let on_device = matches!(scalars, Scalars::Device { .. });
        let key = (*desc, on_device, alignment, workspace.bytes);
        self.cuda.foreign_work(
            || workspace.owner.clone(),
            |stream| {
                if planned.len() >= MOST && !planned.contains_key(&key) {
                    planned.clear();
                }
                let planned = match planned.entry(key) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(Planned::new(desc, on_device)?),
                };
                planned.set_addresses(desc, left.scale, right.scale, bias)?;
                if planned.algorithm.is_none() {
                    let found = planned.choose(
                        self.handle.raw(),
                        desc,
                        workspace.bytes,
                        alignment,
                        self.reductions as u32,
                    )?;
                    planned.algorithm = Some(found);
                }
                let algorithm = planned.algorithm.as_ref().map_or(null(), from_ref);
                let [a, b, d] = planned.raw_layouts();
                // SAFETY: the caller's promise; descriptions live as long as `self`.
                let done = unsafe {
                    lt::matmul(
                        self.handle.raw(),
                        planned.desc.raw(),
                        alpha,
                        beta,
                        right.data as *const c_void,
                        a,
                        left.data as *const c_void,
                        b,
                        addend as *const c_void,
                        d,
                        out as *mut c_void,
                        d,
                        algorithm,
                        workspace.pointer as *mut c_void,
                        workspace.bytes,
                        stream as sys::cudaStream_t,
                    )
                };
                Ok(done.map_err(failed("cublasLtMatmul"))?)
            },
        )
    }
}

/// What all addresses are multiples of, up to the 256 that cuBLASLt expects by default.
fn alignment(addresses: [u64; 3]) -> u32 {
    let common = addresses.into_iter().fold(256, |all, one| all | one);
    1 << common.trailing_zeros()
}

impl Planned {
    fn new(desc: &GemmDesc, scalars_on_device: bool) -> Result<Self, KernelError> {
        let GemmDesc {
            left,
            right,
            epilogue,
            fast_accum,
            ..
        } = *desc;
        let Call {
            operands: [a, b],
            result,
        } = desc.call();
        let desc = lt::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        );
        let desc = desc.map_err(failed("cublasLtMatmulDescCreate"))?;
        let planned = Self {
            // SAFETY: made once, destroyed once, by the function for it.
            desc: unsafe { Owned::new(desc, lt::destroy_matmul_desc) },
            layouts: [layout(&a.matrix)?, layout(&b.matrix)?, layout(&result)?],
            algorithm: None,
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // `cublasOperation_t`: 0 as it is, 1 transposed.
        let turned = |turned: bool| i32::from(turned);
        planned.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &turned(a.transposed),
        )?;
        planned.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &turned(b.transposed),
        )?;
        if scalars_on_device {
            let mode = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE;
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode)?;
        }
        if epilogue == Epilogue::Bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let dtype = dtype(Dtype::Bf16);
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
        }
        let fp8 = |operand: OperandDesc| matches!(operand.dtype, Dtype::E4M3 | Dtype::E5M2);
        if fp8(left) && fp8(right) {
            planned.set(
                Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
                &i8::from(fast_accum),
            )?;
        }
        Ok(planned)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), KernelError> {
        // SAFETY: the description was made, and callers give values of the type of the attribute.
        let set = unsafe {
            lt::set_matmul_desc_attribute(
                self.desc.raw(),
                attribute,
                from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        set.map_err(failed("cublasLtMatmulDescSetAttribute"))
    }

    fn raw_layouts(&self) -> [sys::cublasLtMatrixLayout_t; 3] {
        self.layouts.each_ref().map(Owned::raw)
    }

    /// Where scales and the bias are.
    fn set_addresses(
        &self,
        desc: &GemmDesc,
        left: u64,
        right: u64,
        bias: u64,
    ) -> Result<(), KernelError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let [a, b] = desc.call().operands;
        if let Some(mode) = scale_mode(a.scale) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
        }
        if let Some(mode) = scale_mode(b.scale) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
        }
        if a.scale != ScaleMode::None {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right)?;
        }
        if b.scale != ScaleMode::None {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left)?;
        }
        if desc.epilogue == Epilogue::Bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(())
    }

    /// cuBLASLt's first choice within so many bytes of workspace, for addresses that are multiples of `alignment`, among kernels
    /// of these reduction schemes (a mask of `cublasLtReductionScheme_t`).
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        desc: &GemmDesc,
        workspace: usize,
        alignment: u32,
        reductions: u32,
    ) -> Result<sys::cublasLtMatmulAlgo_t, GemmError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference =
            lt::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        // SAFETY: made once, destroyed once, by the function for it.
        let preference = unsafe { Owned::new(preference, lt::destroy_matmul_pref) };
        let [a, b, d] = self.raw_layouts();
        let alignments = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        // SAFETY: all descriptions are alive; values have the types of their attributes.
        let found = unsafe {
            let set = |attribute, value: *const c_void, bytes| {
                lt::set_matmul_pref_attribute(preference.raw(), attribute, value, bytes)
            };
            let aligned = || {
                alignments.into_iter().try_for_each(|attribute| {
                    set(attribute, from_ref(&alignment).cast(), size_of::<u32>())
                })
            };
            let most = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let room = set(most, from_ref(&workspace).cast(), size_of::<usize>());
            let reduction = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            let reduced = || set(reduction, from_ref(&reductions).cast(), size_of::<u32>());
            room.and_then(|()| aligned())
                .and_then(|()| reduced())
                .and_then(|()| {
                    let (desc, preference) = (self.desc.raw(), preference.raw());
                    lt::get_matmul_algo_heuristic(handle, desc, a, b, d, d, preference)
                })
        };
        found
            .map(|found| found.algo)
            .map_err(|error| GemmError::NoKernel {
                product: desc.describe(),
                alignment,
                why: format!("{:?}", error.0),
            })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let planned = self
            .planned
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let (planned, handle) = (take(planned), &mut self.handle);
        // After the work of the stream, with the device current.
        self.cuda.free_foreign(|| {
            drop(planned);
            handle.destroy();
        });
        // Where the device failed or this thread captures, what runs may still use it.
        handle.leak();
    }
}

/// A matrix described to cuBLASLt.
fn layout(of: &Matrix) -> Result<Handle<sys::cublasLtMatrixLayout_t>, KernelError> {
    let Matrix {
        rows,
        cols,
        ld,
        batch,
        stride,
        ..
    } = *of;
    let ld = i64::try_from(ld).unwrap_or(i64::MAX);
    let made = lt::create_matrix_layout(dtype(of.dtype), rows as u64, cols as u64, ld);
    let made = made.map_err(failed("cublasLtMatrixLayoutCreate"))?;
    // SAFETY: made once, destroyed once, by the function for it.
    let layout = unsafe { Owned::new(made, lt::destroy_matrix_layout) };
    if batch > 1 {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let count = i32::try_from(batch).unwrap_or(i32::MAX);
        let stride = i64::try_from(stride).unwrap_or(i64::MAX);
        // SAFETY: the layout was just made, and the values have the types of their attributes.
        let set = unsafe {
            lt::set_matrix_layout_attribute(
                layout.raw(),
                Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                from_ref(&count).cast(),
                size_of_val(&count),
            )
            .and_then(|()| {
                lt::set_matrix_layout_attribute(
                    layout.raw(),
                    Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    from_ref(&stride).cast(),
                    size_of_val(&stride),
                )
            })
        };
        set.map_err(failed("cublasLtMatrixLayoutSetAttribute"))?;
    }
    Ok(layout)
}

fn failed(call: &'static str) -> impl Fn(CublasError) -> KernelError {
    move |error| KernelError::Device {
        call,
        why: format!("{:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::alignment;

    #[test]
    fn an_alignment_is_that_of_the_worst_address_and_at_most_256() {
        assert_eq!(alignment([512, 0x7000, 256]), 256);
        assert_eq!(alignment([512, 0x7010, 256]), 16);
        assert_eq!(alignment([512, 0x7010, 257]), 1);
        assert_eq!(alignment([0, 0, 0]), 256);
    }
}
