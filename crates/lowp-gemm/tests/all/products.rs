//! Products of bf16 matrices on every backend: the definition, whatever the sides, the transposition and the threads.

use std::ops::Range;

use half::bf16;
use lowp_gemm::{CpuProducts, Factor, GemmError, ProductJob, Products};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError};
use proptest::prelude::*;

/// Integers of few bits: their sums are exact in any order.
fn values(seed: u64, len: usize) -> Vec<bf16> {
    let random = lowp_format::Philox::new(seed, 0);
    let word = |i: usize| random.block((i / 4) as u64)[i % 4] % 9;
    (0..len)
        .map(|i| bf16::from_f32(word(i) as f32 - 4.0))
        .collect()
}

fn upload(values: &[bf16]) -> CpuBuffer<bf16> {
    Cpu.upload(values).expect("room")
}

/// The sign of a zero depends on the order of a sum.
fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| (*x + bf16::ZERO).to_bits()).collect()
}

/// A product of random integers.
#[derive(Clone, Copy, Debug)]
struct Case {
    sizes: [usize; 3],
    transposed: [bool; 2],
    added: bool,
    seed: u64,
}

const ALPHA: f32 = 0.5;
const BETA: f32 = 3.0;

impl Case {
    /// Its operands, as they are stored, and the addend.
    fn values(&self) -> [Vec<bf16>; 3] {
        let [rows, cols, k] = self.sizes;
        [rows * k, k * cols, rows * cols].map(|len| values(self.seed ^ len as u64, len))
    }

    /// The product of the entries of the contracted axis that are in `part`, before it is rounded.
    fn sums(&self, part: Range<usize>) -> Vec<f32> {
        let Self {
            sizes: [rows, cols, k],
            transposed,
            ..
        } = *self;
        let [left, right, _] = self.values();
        let at =
            |values: &[bf16], transposed: bool, [outer, inner]: [usize; 2], i: usize, j: usize| {
                let index = if transposed {
                    j * outer + i
                } else {
                    i * inner + j
                };
                values[index].to_f32()
            };
        let entry = |index: usize| {
            let (i, j) = (index / cols, index % cols);
            let terms = part.clone().map(|l| {
                at(&left, transposed[0], [rows, k], i, l)
                    * at(&right, transposed[1], [k, cols], l, j)
            });
            terms.sum()
        };
        (0..rows * cols).map(entry).collect()
    }

    /// By the definition.
    fn expected(&self) -> Vec<bf16> {
        let [_, _, addend] = self.values();
        let entry = |(sum, before): (f32, &bf16)| {
            let before = if self.added {
                BETA * before.to_f32()
            } else {
                0.0
            };
            bf16::from_f32(before + ALPHA * sum)
        };
        let sums = self.sums(0..self.sizes[2]);
        sums.into_iter().zip(&addend).map(entry).collect()
    }

    /// By `products`, and by a graph of them, which multiplies what its buffers hold at the launch.
    fn check<B: Backend>(&self, products: &impl Products<B>) -> Result<(), GemmError> {
        let backend = products.backend();
        let [left, right, addend] = self.values();
        let factor = |values: &[bf16], transposed| -> Result<Factor<B>, GemmError> {
            let values = backend.upload(values)?;
            Ok(Factor { values, transposed })
        };
        let job = ProductJob {
            sizes: self.sizes,
            left: factor(&left, self.transposed[0])?,
            right: factor(&right, self.transposed[1])?,
            alpha: ALPHA,
            addend: match self.added {
                true => Some((BETA, backend.upload(&addend)?)),
                false => None,
            },
            out: backend.alloc(self.sizes[0] * self.sizes[1])?,
        };
        let (expected, out) = (bits(&self.expected()), || backend.download(&job.out));
        products.multiply(&job)?;
        assert_eq!(bits(&out()?), expected, "{self:?}");
        backend.write(&job.out, 0, &vec![bf16::ZERO; expected.len()])?;
        let graph = backend.capture(|| products.multiply(&job))?;
        assert!(out()?.iter().all(|x| x.to_f32() == 0.0), "{self:?}");
        backend.launch(&graph)?;
        assert_eq!(bits(&out()?), expected, "{self:?}");
        Ok(())
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = [1usize..20, 1usize..20, 1usize..20];
    let case = |(sizes, transposed, added, seed)| Case {
        sizes,
        transposed,
        added,
        seed,
    };
    (sizes, any::<[bool; 2]>(), any::<bool>(), any::<u64>()).prop_map(case)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_product_is_the_sum_rounded_once(case in cases(), threads in 1usize..4) {
        case.check(&CpuProducts { threads })?;
    }
}

/// A sum that a library may split: parts that are rounded to bf16 before they are added up would show.
fn long_sums<B: Backend>(products: &impl Products<B>) {
    for [rows, cols] in [[32, 32], [8, 64]] {
        let case = Case {
            sizes: [rows, cols, 1 << 16],
            transposed: [false, true],
            added: false,
            seed: 1,
        };
        let [first, second] = [0..1 << 15, 1 << 15..1 << 16].map(|part| case.sums(part));
        let rounded = |sum: f32| bf16::from_f32(ALPHA * sum).to_f32();
        let split = first.into_iter().zip(second);
        let split = split.map(|(a, b)| bf16::from_f32(rounded(a) + rounded(b)));
        assert_ne!(bits(&split.collect::<Vec<_>>()), bits(&case.expected()));
        case.check(products).expect("a product");
    }
}

#[test]
fn long_sums_are_rounded_once() {
    long_sums(&CpuProducts { threads: 2 });
}

/// The same bits as on the CPU.
#[cfg(feature = "cuda")]
#[test]
fn cuda_multiplies_as_defined() {
    use lowp_kernels::Cuda;
    use proptest::test_runner::TestRunner;
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let products = match lowp_gemm::CudaProducts::new(&cuda) {
        Err(error @ GemmError::NoCublas) => return eprintln!("skipped: {error}"),
        products => products.expect("products"),
    };
    assert_eq!(products.workspace_bytes(), lowp_gemm::DEVICE_WORKSPACE);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(64));
    let checked = runner.run(&cases(), |case| Ok(case.check(&products)?));
    checked.expect("products as defined");
    // Kernels of larger tiles.
    for (seed, sizes) in [[256, 128, 512], [200, 264, 136], [1000, 72, 40]]
        .into_iter()
        .enumerate()
    {
        for transposed in [[false, true], [true, false], [false, false]] {
            let case = Case {
                sizes,
                transposed,
                added: true,
                seed: seed as u64,
            };
            case.check(&products).expect("a product");
        }
    }
    long_sums(&products);
}

#[test]
fn what_does_not_fit_is_refused() {
    let buffer = |len: usize| upload(&vec![bf16::ONE; len]);
    let job = ProductJob {
        sizes: [2, 3, 4],
        left: Factor::new(&buffer(8)),
        right: Factor::new(&buffer(12)).t(),
        alpha: 1.0,
        addend: Some((1.0, buffer(6))),
        out: buffer(6),
    };
    let products = CpuProducts { threads: 1 };
    products.multiply(&job).expect("it fits");
    let refused = |job: ProductJob<Cpu>| products.multiply(&job).unwrap_err();
    let says = |job: ProductJob<Cpu>, what: &str| {
        let error = refused(job).to_string();
        assert!(error.contains(what), "{error}");
    };
    let left = Factor::new(&buffer(9));
    says(
        ProductJob {
            left,
            ..job.clone()
        },
        "the left operand of a product",
    );
    let right = Factor::new(&buffer(11));
    says(
        ProductJob {
            right,
            ..job.clone()
        },
        "the right operand of a product",
    );
    let addend = Some((1.0, buffer(5)));
    says(
        ProductJob {
            addend,
            ..job.clone()
        },
        "the addend of a product",
    );
    let out = buffer(7);
    says(ProductJob { out, ..job.clone() }, "the result of a product");
    let addend = Some((1.0, job.out.clone()));
    let shared = refused(ProductJob {
        addend,
        ..job.clone()
    });
    assert!(
        matches!(shared, GemmError::Kernel(KernelError::Aliased { .. })),
        "{shared}"
    );
    let empty = ProductJob {
        sizes: [2, 3, 0],
        left: Factor::new(&buffer(0)),
        right: Factor::new(&buffer(0)),
        ..job
    };
    says(empty, "2 x 3 x 0 has no elements");
}
