//! A rank that begins with the weights of a folder holds its shard and at most one full tensor.

#![expect(unsafe_code, reason = "implements an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_file::{Hub, Values};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ModelOptions, ShardedModel, Sharding};
use lowp_kernels::Cpu;
use lowp_train::{HubValues, Model};
use lowp_transformer::{Arch, GptConfig, Llama};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

// SAFETY: every call goes to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The parameters of `model` in bf16, all ones, as a folder of Hugging Face.
fn write(folder: &Path, model: &GptConfig) -> Result<(), Box<dyn Error>> {
    let linears = model.linears().into_iter();
    let linears = linears.map(|linear| (linear.name, vec![linear.rows, linear.cols]));
    let vars = model.vars().into_iter().map(|var| (var.name, var.shape));
    let (mut header, mut end) = (String::new(), 0);
    for (name, shape) in linears.chain(vars) {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let first = if begin == 0 { "" } else { "," };
        write!(
            header,
            "{first}\"{name}\":{{\"dtype\":\"BF16\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}"
        )?;
    }
    let header = format!("{{{header}}}");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend([0x80, 0x3F].repeat(end / 2));
    fs::write(folder.join("model.safetensors"), bytes)?;
    let config = model.transformers().ok_or("a configuration")?;
    fs::write(folder.join("config.json"), config.to_string())?;
    Ok(())
}

#[test]
fn a_rank_reads_its_shard_and_one_tensor() -> Result<(), Box<dyn Error>> {
    const WORLD: usize = 4;
    let model = GptConfig {
        dim: 128,
        layers: 12,
        heads: 4,
        seq: 64,
        vocab: 1024,
        arch: Arch::Llama(Llama::new(2)),
    };
    let folder = tempfile::tempdir()?;
    write(folder.path(), &model)?;
    let hub = Hub::open(folder.path())?;
    let values = HubValues(Values::new(&hub)?);
    let recipe: Variant = "fp8-current".parse()?;
    let (linears, vars) = (model.linears(), model.vars());
    let largest = linears.iter().map(|linear| linear.rows * linear.cols);
    let largest = largest.chain(vars.iter().map(|var| var.shape.iter().product()));
    let largest = 4 * largest.max().unwrap_or(0);
    let all = 4 * model.parameters();
    assert!(largest * 12 < all);
    for sharding in [Sharding::Fsdp, Sharding::Zero1] {
        let options = ModelOptions {
            sharding,
            ..ModelOptions::default()
        };
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let held = run_ranks(&Cpu, WORLD, Duration::from_secs(60), |_, comm| {
            let mesh = MeshComm::new(Mesh::sharded(WORLD), comm.clone())?;
            let made = ShardedModel::with_values(
                &Cpu,
                &mesh,
                |_| recipe,
                &linears,
                &vars,
                options,
                &values,
            )?;
            comm.control().all_equal("the model", "made")?;
            let held = LIVE.load(Relaxed);
            // Freed once all have looked.
            comm.control().all_equal("the memory", "read")?;
            drop(made);
            Ok::<_, Box<dyn Error + Send + Sync>>(held)
        })
        .map_err(|failed| failed.to_string())?;
        let held = held.into_iter().max().unwrap_or(0) - before;
        let peak = PEAK.load(Relaxed) - before;
        // Masters and moments of all elements once over all ranks, and codes.
        assert!(held > 3 * all, "{sharding:?}: {held}");
        let most = held + WORLD * largest;
        assert!(
            peak <= most,
            "{sharding:?}: {peak} bytes at once, of {held} that stay and {WORLD} times {largest} of a tensor"
        );
    }
    Ok(())
}
