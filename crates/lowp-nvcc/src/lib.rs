//! Compiling CUDA kernels with nvcc and embedding them: for the build scripts of lowp-kernels, lowp-transformer and lowp-nccl, and for
//! `cargo xtask cuda`, so that they use the same flags and architectures, and the same check of what is up to date.
//!
//! Each `.cu` file of a folder is a unit: it is compiled for every architecture into one fat binary, which
//! becomes one driver module. Units share no device code, so nothing is linked across them.
//! Next to the fat binaries is a manifest: digests of the sources and flags of each.
//!
//! A build script:
//!
//! ```no_run
//! use std::path::Path;
//!
//! lowp_nvcc::rerun_if_changed();
//! let out = std::env::var("OUT_DIR").map_err(|error| error.to_string())?;
//! let sources = lowp_nvcc::Sources { cuda: Path::new("cuda"), headers: &[] };
//! lowp_nvcc::embed(Path::new(&out), sources, "cuda-kernels/mine")?;
//! # Ok::<(), String>(())
//! ```

mod build_script;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::{env, fmt, fs, io, thread};

pub use build_script::{
    compiled, embed, embed_beside_kernels, end, rerun_if_changed, target_folder,
};

/// An architecture that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// What users call it.
    pub name: &'static str,
    /// The arguments of `-gencode`. The oldest and the newest add PTX, which drivers compile for
    /// devices that none of the others fit.
    gencode: &'static [&'static str],
}

impl Arch {
    /// The virtual architectures that the sources are compiled for, such as `compute_100f`.
    pub fn targets(&self) -> Vec<&'static str> {
        let target = |gencode: &&'static str| gencode.strip_prefix("arch=")?.split(',').next();
        let mut targets: Vec<_> = self.gencode.iter().filter_map(target).collect();
        targets.dedup();
        targets
    }

    /// What is compiled: code such as `sm_100f`, or PTX, `compute_120`.
    pub fn code(&self) -> Vec<&'static str> {
        let code = |gencode: &&'static str| Some(gencode.split_once("code=")?.1);
        self.gencode.iter().filter_map(code).collect()
    }

    /// Whether its code has the instructions of a family of devices.
    pub fn is_family(&self) -> bool {
        self.code().iter().any(|code| code.ends_with('f'))
    }

    /// The architecture whose code runs on GPUs of this compute capability.
    pub fn of_capability((major, minor): (u32, u32)) -> Option<Self> {
        let name = match (major, minor) {
            (8 | 9, _) | (10, 0 | 3) | (12, 0 | 1) => format!("sm_{major}0"),
            _ => return None,
        };
        ARCHITECTURES.iter().find(|arch| arch.name == name).copied()
    }
}

/// Ampere, Hopper, Blackwell (data centre) and Blackwell (workstation). The `f` targets have the
/// conversion instructions of their family; devices of the family run them.
pub const ARCHITECTURES: &[Arch] = &[
    Arch {
        name: "sm_80",
        gencode: &[
            "arch=compute_80,code=sm_80",
            "arch=compute_80,code=compute_80",
        ],
    },
    Arch {
        name: "sm_90",
        gencode: &["arch=compute_90,code=sm_90"],
    },
    Arch {
        name: "sm_100",
        gencode: &["arch=compute_100f,code=sm_100f"],
    },
    Arch {
        name: "sm_120",
        gencode: &[
            "arch=compute_120f,code=sm_120f",
            "arch=compute_120,code=compute_120",
        ],
    },
];

/// Flags of every unit. The first four keep the bits of the scalar definition: no contraction,
/// division and square root rounded to nearest, subnormals kept.
pub const FLAGS: &[&str] = &[
    "-fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
];

/// First line of a manifest.
const FORMAT: &str = "lowp CUDA kernels 1";

/// A failure, in words.
pub type Result<T> = std::result::Result<T, String>;

/// A folder of units, and the headers that they include.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The folder, with headers of its own below `include`.
    pub cuda: &'a Path,
    /// Folders of other headers.
    pub headers: &'a [&'a Path],
}

impl Sources<'_> {
    /// The folders of headers, in the order in which the compiler looks for one.
    fn includes(&self) -> Vec<PathBuf> {
        let own = self.cuda.join("include");
        let others = self.headers.iter().map(|folder| folder.to_path_buf());
        [own].into_iter().chain(others).collect()
    }
}

/// A CUDA compiler.
#[derive(Clone, Debug)]
pub struct Nvcc {
    /// The program.
    pub program: PathBuf,
    /// Its release.
    pub version: String,
}

impl Nvcc {
    /// The compiler of `CUDA_HOME`, else the one on `PATH`.
    ///
    /// # Errors
    /// `CUDA_HOME` is set but has no compiler that runs.
    pub fn find() -> Result<Option<Self>> {
        if let Some(home) = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()) {
            return Self::at(&Path::new(&home).join("bin/nvcc"))
                .map(Some)
                .map_err(|why| format!("CUDA_HOME is set, but {why}"));
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let found = env::split_paths(&path)
            .map(|folder| folder.join("nvcc"))
            .find(|program| program.is_file());
        found.map(|program| Self::at(&program)).transpose()
    }

    /// The compiler `program`.
    ///
    /// # Errors
    /// It does not run.
    pub fn at(program: &Path) -> Result<Self> {
        let output = output(Command::new(program).arg("--version"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // "Cuda compilation tools, release 13.0, V13.0.88"
        let version = text
            .lines()
            .find_map(|line| line.split_once(", release ").map(|(_, rest)| rest))
            .ok_or_else(|| format!("`{} --version` names no release", program.display()))?;
        Ok(Self {
            program: program.to_path_buf(),
            version: version.trim().to_owned(),
        })
    }

    /// What `source` becomes for a target of [`Arch::targets`], in PTX; `folder` is for the compiler.
    ///
    /// # Errors
    /// The compiler's messages.
    pub fn ptx(
        &self,
        source: &Path,
        include: &Path,
        target: &str,
        folder: &Path,
    ) -> Result<String> {
        let made = folder.join(format!("{target}.ptx"));
        let mut command = Command::new(&self.program);
        command.args(FLAGS).args(["-ptx", "-arch", target]);
        command.arg("-I").arg(include).arg("-o").arg(&made);
        output(command.arg(source))?;
        fs::read_to_string(&made).map_err(|e| format!("{}: {e}", made.display()))
    }

    fn compile(&self, unit: &Unit, archs: &[Arch], folder: &Path) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(FLAGS).arg("-fatbin");
        for gencode in archs.iter().flat_map(|arch| arch.gencode) {
            command.args(["-gencode", gencode]);
        }
        for folder in &unit.includes {
            command.arg("-I").arg(folder);
        }
        command
            .arg("-o")
            .arg(folder.join(unit.file()))
            .arg(&unit.source);
        let output = output(&mut command)?;
        let log = [output.stdout, output.stderr].concat();
        write(&folder.join(unit.log()), &log)
    }
}

/// One `.cu` file.
#[derive(Clone, Debug)]
pub struct Unit {
    /// The file's stem.
    pub name: String,
    source: PathBuf,
    /// Folders of headers.
    includes: Vec<PathBuf>,
    /// Of the file, the project's headers that it includes, the flags and the architectures' targets.
    digest: String,
}

impl Unit {
    /// The units of `sources`, sorted by name.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn all(sources: Sources<'_>) -> Result<Vec<Self>> {
        let (cuda, includes) = (sources.cuda, sources.includes());
        let entries = fs::read_dir(cuda).map_err(|e| format!("{}: {e}", cuda.display()))?;
        let mut units = Vec::new();
        for entry in entries {
            let source = entry.map_err(|e| e.to_string())?.path();
            if source
                .extension()
                .is_some_and(|extension| extension == "cu")
            {
                let name = source
                    .file_stem()
                    .map(|stem| stem.to_string_lossy().into_owned())
                    .unwrap_or_default();
                let digest = digest(cuda, &includes, &source)?;
                units.push(Self {
                    name,
                    source,
                    includes: includes.clone(),
                    digest,
                });
            }
        }
        units.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(units)
    }

    /// Name of its fat binary.
    pub fn file(&self) -> String {
        format!("{}.fatbin", self.name)
    }

    /// Name of the compiler's report on it: registers, spills, shared memory.
    pub fn log(&self) -> String {
        format!("{}.log", self.name)
    }
}

/// What a folder of fat binaries was made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The compiler's release.
    pub compiler: String,
    /// The names of the architectures.
    pub archs: Vec<String>,
    units: Vec<(String, String)>,
}

impl Manifest {
    /// The manifest of `folder`, if there is one that can be read.
    pub fn load(folder: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(folder.join("manifest.txt")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next()? != FORMAT {
            return None;
        }
        let mut manifest = Self::default();
        for line in lines {
            let (key, value) = line.split_once(' ')?;
            match key {
                "compiler" => manifest.compiler = value.to_owned(),
                "archs" => manifest.archs = value.split(' ').map(str::to_owned).collect(),
                "unit" => {
                    let (name, digest) = value.split_once(' ')?;
                    manifest.units.push((name.to_owned(), digest.to_owned()));
                }
                // For people.
                "flags" => {}
                _ => return None,
            }
        }
        Some(manifest)
    }

    /// Whether `unit` was made of what it is now.
    pub fn has(&self, unit: &Unit) -> bool {
        self.units
            .iter()
            .any(|(name, digest)| *name == unit.name && *digest == unit.digest)
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FORMAT}")?;
        writeln!(f, "compiler {}", self.compiler)?;
        writeln!(f, "flags {}", FLAGS.join(" "))?;
        writeln!(f, "archs {}", self.archs.join(" "))?;
        for (name, digest) in &self.units {
            writeln!(f, "unit {name} {digest}")?;
        }
        Ok(())
    }
}

/// Compiles the units of `sources` into `folder`, several at a time, and writes the manifest.
/// Units that are up to date are left. Returns the names of those that were compiled.
///
/// # Errors
/// The compiler's messages, or a file that cannot be read or written.
pub fn compile(
    nvcc: &Nvcc,
    sources: Sources<'_>,
    archs: &[Arch],
    folder: &Path,
) -> Result<Vec<String>> {
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let units = Unit::all(sources)?;
    let names: Vec<String> = archs.iter().map(|arch| arch.name.to_owned()).collect();
    let old = Manifest::load(folder)
        .filter(|old| old.compiler == nvcc.version && old.archs == names)
        .unwrap_or_default();
    let fresh = |unit: &&Unit| {
        let there = |name| folder.join(name).is_file();
        old.has(unit) && there(unit.file()) && there(unit.log())
    };
    let stale: Vec<&Unit> = units.iter().filter(|unit| !fresh(unit)).collect();
    // Without a manifest an interrupted run cannot pass for a finished one.
    if !stale.is_empty() {
        match fs::remove_file(folder.join("manifest.txt")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.to_string()),
            _ => {}
        }
    }
    let queue = Mutex::new(stale.iter());
    let next = || queue.lock().ok().and_then(|mut queue| queue.next());
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(stale.len());
    thread::scope(|scope| {
        let work = || {
            while let Some(unit) = next() {
                nvcc.compile(unit, archs, folder)?;
            }
            Ok(())
        };
        let running: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        running.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a compiling thread failed".to_owned()))
        })
    })?;
    let manifest = Manifest {
        compiler: nvcc.version.clone(),
        archs: names,
        units: units
            .iter()
            .map(|unit| (unit.name.clone(), unit.digest.clone()))
            .collect(),
    };
    write(
        &folder.join("manifest.txt"),
        manifest.to_string().as_bytes(),
    )?;
    Ok(stale.iter().map(|unit| unit.name.clone()).collect())
}

/// Digest of `source`, of the project's headers that it includes, directly or not, of the flags and
/// of the targets of every architecture. Headers of the CUDA toolkit belong to the compiler's version.
fn digest(cuda: &Path, includes: &[PathBuf], source: &Path) -> Result<String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![source.to_path_buf()];
    while let Some(path) = pending.pop() {
        let mut roots = [cuda]
            .into_iter()
            .chain(includes.iter().map(PathBuf::as_path));
        let name = roots.find_map(|root| path.strip_prefix(root).ok());
        let name = name.unwrap_or(&path).to_path_buf();
        if found.contains_key(&name) {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let beside = path.parent().unwrap_or(cuda);
        for header in text.lines().filter_map(included) {
            let folders = [beside]
                .into_iter()
                .chain(includes.iter().map(PathBuf::as_path));
            let mut places = folders.map(|folder| folder.join(header));
            pending.extend(places.find(|place| place.is_file()));
        }
        found.insert(name, text);
    }
    let mut hash = Fnv::new();
    let gencodes = ARCHITECTURES.iter().flat_map(|arch| arch.gencode);
    for flag in FLAGS.iter().chain(gencodes) {
        hash.add(flag.as_bytes());
    }
    for (name, text) in &found {
        hash.add(name.to_string_lossy().as_bytes());
        hash.add(text.as_bytes());
    }
    Ok(format!("{:032x}", hash.0))
}

/// The name in an `#include` line.
fn included(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start();
    let rest = rest.strip_prefix("include")?.trim_start();
    let close = match rest.chars().next()? {
        '"' => '"',
        '<' => '>',
        _ => return None,
    };
    rest[1..].split_once(close).map(|(name, _)| name)
}

/// FNV-1a in 128 bits: the same in every version of Rust.
struct Fnv(u128);

impl Fnv {
    const fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        let length = (bytes.len() as u64).to_le_bytes();
        for &byte in length.iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
        }
    }
}

/// Runs `command`; its output as an error if it fails.
fn output(command: &mut Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let arguments: Vec<_> = command
        .get_args()
        .map(|arg| arg.to_string_lossy())
        .collect();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Err(format!(
        "`{program} {}` failed ({})\n{}\n{}",
        arguments.join(" "),
        output.status,
        text(&output.stdout),
        text(&output.stderr),
    ))
}

/// Writes a file; errors have its path.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_what_sources_are_compiled_for() {
        let targets = ARCHITECTURES.iter().map(Arch::targets);
        let expected: [&[&str]; 4] = [
            &["compute_80"],
            &["compute_90"],
            &["compute_100f"],
            &["compute_120f", "compute_120"],
        ];
        assert!(targets.eq(expected));
    }

    #[test]
    fn code_is_of_the_family_of_a_device() {
        let name = |capability| Arch::of_capability(capability).map(|arch| arch.name);
        let known = [(8, 9), (9, 0), (10, 3), (12, 1)].map(name);
        assert_eq!(known, ["sm_80", "sm_90", "sm_100", "sm_120"].map(Some));
        assert_eq!([(7, 5), (11, 0), (13, 0)].map(name), [None; 3]);
        assert_eq!(ARCHITECTURES[3].code(), ["sm_120f", "compute_120"]);
    }
}
