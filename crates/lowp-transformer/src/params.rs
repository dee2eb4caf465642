//! [`Arg`] and [`KERNELS`]: what the kernels in `../cuda/*.cu` take, and the check of what they are given.

use Kind::{Float, Halves, Int, Octets, Size, Words};

/// Bytes that a kernel loads or stores at once (`../cuda/include/octet.cuh`).
const OCTET: u64 = 16;

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The address of values that are loaded or stored eight at a time.
    Octets,
    /// The address of 4-byte entries.
    Words,
    /// The address of 2-byte entries.
    Halves,
    /// An `int`.
    Int,
    /// A `size_t`.
    Size,
    /// A `float`.
    Float,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    Pointer(u64),
    Int(i32),
    Size(usize),
    Float(f32),
}

/// The kernels of each `.cu` file, and their parameters.
pub(crate) const KERNELS: [(&str, &[Kernel]); 5] = [
    (
        "norm",
        &[
            (
                "norm_forward",
                &[
                    Octets, Octets, Octets, Octets, Octets, Octets, Words, Int, Float,
                ],
            ),
            (
                "norm_backward",
                &[
                    Octets, Octets, Words, Octets, Octets, Octets, Octets, Int, Int, Int, Int,
                ],
            ),
            ("column_sums", &[Words, Int, Int, Words, Words]),
        ],
    ),
    (
        "activation",
        &[
            ("gelu_forward", &[Octets, Octets, Size]),
            ("gelu_backward", &[Octets, Octets, Octets, Size]),
            ("swiglu_forward", &[Octets, Octets, Octets, Size]),
            (
                "swiglu_backward",
                &[Octets, Octets, Octets, Octets, Octets, Size],
            ),
            ("narrow", &[Octets, Octets, Size]),
            ("two_level_factors", &[Words, Words, Float, Words]),
        ],
    ),
    (
        "cast",
        &[
            ("gelu_forward_cast", &[Octets, Words, Words, Octets, Int]),
            (
                "gelu_backward_cast",
                &[Octets, Words, Words, Words, Octets, Octets, Int],
            ),
            (
                "swiglu_forward_cast",
                &[Octets, Words, Words, Octets, Octets, Int],
            ),
            (
                "swiglu_backward_cast",
                &[
                    Octets, Words, Words, Octets, Words, Words, Words, Octets, Octets, Octets, Int,
                ],
            ),
        ],
    ),
    (
        "attention",
        &[
            ("split_heads", HEADS),
            ("merge_heads", HEADS),
            ("rotate", &[Octets, Octets, Int, Int, Int, Float, Size]),
            ("document_mask", &[Words, Halves, Int]),
            ("softmax_forward", &[Words, Halves, Words, Int, Int, Int]),
            ("softmax_backward", &[Halves, Words, Halves, Int, Float]),
            (
                "norm_heads",
                &[
                    Octets, Octets, Octets, Octets, Int, Int, Int, Int, Float, Size,
                ],
            ),
            (
                "norm_heads_backward",
                &[
                    Octets, Octets, Octets, Octets, Words, Int, Int, Int, Int, Int, Float, Size,
                ],
            ),
        ],
    ),
    (
        "tokens",
        &[
            (
                "embedding_forward",
                &[Words, Octets, Octets, Octets, Int, Int, Size],
            ),
            ("sum_rows", &[Octets, Words, Words, Octets, Octets, Int]),
            (
                "cross_entropy",
                &[Octets, Words, Words, Octets, Int, Float, Float],
            ),
            ("add_losses", &[Words, Int, Float, Words]),
        ],
    ),
];

/// A name and the parameters.
pub(crate) type Kernel = (&'static str, &'static [Kind]);

const HEADS: &[Kind] = &[Octets, Octets, Octets, Int, Int, Int, Int, Int, Size];

impl Arg {
    /// An `int`: kernels count rows and columns in it.
    pub(crate) fn int(n: usize) -> Result<Self, String> {
        let most = i32::MAX;
        let fits = i32::try_from(n).map(Self::Int);
        fits.map_err(|_| format!("a kernel counts to {most}, not to {n}; use smaller batches"))
    }

    /// As the kernel reads it, from the lowest byte on.
    pub(crate) fn word(self) -> u64 {
        match self {
            Arg::Pointer(address) => address,
            Arg::Int(value) => u64::from(value.cast_unsigned()),
            Arg::Size(value) => value as u64,
            Arg::Float(value) => u64::from(value.to_bits()),
        }
    }

    /// Whether a parameter of `kind` may be this; or what is wrong.
    fn check(self, kind: Kind) -> Result<(), String> {
        let size = match (kind, self) {
            (Octets, Arg::Pointer(_)) => OCTET,
            (Words, Arg::Pointer(_)) => 4,
            (Halves, Arg::Pointer(_)) => 2,
            (Int, Arg::Int(_)) | (Size, Arg::Size(_)) | (Float, Arg::Float(_)) => return Ok(()),
            _ => return Err(format!("is {self:?}, not {kind:?}")),
        };
        match self.word().is_multiple_of(size) {
            true => Ok(()),
            false => Err(format!(
                "lies at {:#x}, which is no multiple of {size} bytes; take a view that begins at one",
                self.word()
            )),
        }
    }
}

/// Checks what `kernel` is given.
pub(crate) fn check((name, kinds): Kernel, args: &[Arg]) -> Result<(), String> {
    if args.len() != kinds.len() {
        let (found, needed) = (args.len(), kinds.len());
        return Err(format!("{name} takes {needed} parameters, not {found}"));
    }
    let mut each = kinds.iter().zip(args).enumerate();
    each.try_for_each(|(at, (&kind, arg))| {
        let checked = arg.check(kind);
        checked.map_err(|why| format!("parameter {at} of {name} {why}"))
    })
}

/// `n` values in groups of eight.
pub(crate) fn octets(n: usize) -> Result<usize, String> {
    match n.is_multiple_of(8) {
        true => Ok(n / 8),
        false => Err(format!("{n} values, which are no multiple of 8")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The kernels of a source as it declares them.
    fn declared(source: &str) -> BTreeMap<String, Vec<Kind>> {
        let kernels = source.split("extern \"C\" __global__ void ").skip(1);
        let named = kernels.map(|kernel| {
            let kernel = match kernel.strip_prefix("__launch_bounds__(") {
                Some(rest) => rest.split_once(')').unwrap().1.trim_start(),
                None => kernel,
            };
            let (name, rest) = kernel.split_once('(').unwrap();
            let (params, body) = rest.split_once(')').unwrap();
            let kinds = params.split(',').map(|param| kind(param.trim(), body));
            (name.to_owned(), kinds.collect())
        });
        named.collect()
    }

    /// The type of a parameter; what `body` does with it says whether it is used eight values at a time.
    fn kind(param: &str, body: &str) -> Kind {
        let (of, name) = param.rsplit_once(' ').unwrap();
        match of {
            "int" => return Int,
            "size_t" => return Size,
            "float" => return Float,
            _ => assert!(of.ends_with('*'), "{param}"),
        }
        // Of a pointer that begins at the parameter, too.
        let local = format!(" = {name} +");
        let before = body
            .split(&local)
            .next()
            .filter(|before| before.len() < body.len());
        let local = before.and_then(|before| before.rsplit(['*', ' ']).next());
        let by_eight = [Some(name), local].into_iter().flatten().any(|name| {
            let calls = ["load8(", "store8(", "words8(", "made8(", "octets("];
            calls.iter().any(|call| {
                let uses = body.split(call).skip(1);
                uses.map(|rest| rest.split([' ', ',', ')']).next())
                    .any(|used| used == Some(name))
            })
        });
        match of.contains("bf16") {
            // Pairs of words, read in eights.
            _ if by_eight || of.contains("float2") => Octets,
            true => Halves,
            false => Words,
        }
    }

    #[test]
    fn kernels_take_what_their_sources_declare() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let sources = std::fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().path());
        let sources = sources.filter(|path| path.extension().is_some_and(|e| e == "cu"));
        let found: BTreeMap<_, _> = sources
            .map(|path| {
                let source = std::fs::read_to_string(&path).unwrap();
                let unit = path.file_stem().unwrap().to_str().unwrap().to_owned();
                (unit, declared(&source))
            })
            .collect();
        let known = KERNELS.map(|(unit, kernels)| {
            let own = |(name, kinds): &Kernel| ((*name).to_owned(), kinds.to_vec());
            (unit.to_owned(), kernels.iter().map(own).collect())
        });
        assert_eq!(BTreeMap::from(known), found);
    }

    #[test]
    fn a_number_that_an_int_does_not_hold_is_an_error() {
        assert_eq!(Arg::int(0x7FFF_FFFF).map(Arg::word), Ok(0x7FFF_FFFF));
        for n in [1 << 31, 1 << 32, usize::MAX] {
            let why = Arg::int(n).unwrap_err();
            assert!(why.contains(&n.to_string()), "{why}");
        }
        assert_eq!(Arg::Int(-1).word(), 0xFFFF_FFFF);
        assert_eq!(Arg::Float(-1.0).word(), 0xBF80_0000);
    }

    #[test]
    fn addresses_are_multiples_of_what_is_loaded_at_once() {
        for (kind, size) in [(Octets, 16u64), (Words, 4), (Halves, 2)] {
            for offset in 0..=32 {
                let checked = Arg::Pointer(0x7f00_0000_0000 + offset).check(kind);
                assert_eq!(checked.is_ok(), offset % size == 0, "{kind:?} at {offset}");
            }
            assert_eq!(Arg::Pointer(0).check(kind), Ok(()));
        }
    }

    #[test]
    fn what_is_given_must_be_what_is_taken() {
        let narrow = ("narrow", &[Octets, Octets, Size][..]);
        let [from, to] = [0x100, 0x200].map(Arg::Pointer);
        assert_eq!(check(narrow, &[from, to, Arg::Size(4)]), Ok(()));
        for (args, why) in [
            (&[from, to][..], "takes 3 parameters, not 2"),
            (
                &[from, to, Arg::Int(4)],
                "parameter 2 of narrow is Int(4), not Size",
            ),
            (&[from, Arg::Pointer(0x204), Arg::Size(4)], "0x204"),
            (&[Arg::Float(1.0), to, Arg::Size(4)], "parameter 0"),
        ] {
            let found = check(narrow, args).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
    }

    #[test]
    fn eights_are_whole() {
        assert_eq!(octets(64), Ok(8));
        assert!(octets(65).unwrap_err().starts_with("65 values"));
    }
}
