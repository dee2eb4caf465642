//! How fast ranks read the weights of a Hugging Face folder, compared with a plain read of its files, and the most memory that the process had:
//! `cargo run --release -p lowp-train --example read_model -- FOLDER RANKS RECIPE`.
use lowp_comm::{Mesh, MeshComm, run_ranks};
use lowp_file::{Hub, Values};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ModelOptions, ShardedModel};
use lowp_kernels::Cpu;
use lowp_train::{HubValues, Model};
use lowp_transformer::GptConfig;
use std::io::Read;
use std::time::{Duration, Instant};
use std::{env, error::Error, fs, io, path::Path};
/// Bytes of the files of weights, and the seconds in which they are read one after the other, as `cat` does.
fn cat(folder: &Path) -> io::Result<(u64, f64)> {
    let (begun, mut bytes, mut buffer) = (Instant::now(), 0, vec![0; 1 << 17]);
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let mut file = fs::File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => bytes += count as u64,
            }
        }
    }
    Ok((bytes, begun.elapsed().as_secs_f64()))
}
/// Seconds in which `ranks` ranks make their shards.
fn read(folder: &Path, ranks: usize, recipe: Variant) -> Result<f64, Box<dyn Error>> {
    let json = serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
    let model = GptConfig::of_hub("config.json", &json, None)?;
    let hub = Hub::open(folder)?;
    let values = HubValues(Values::new(&hub)?);
    let begun = Instant::now();
    run_ranks(&Cpu, ranks, Duration::from_secs(3600), |_, comm| {
        let mesh = MeshComm::new(Mesh::sharded(ranks), comm)?;
        let (linears, vars) = (model.linears(), model.vars());
        let options = ModelOptions::default();
        ShardedModel::with_values(&Cpu, &mesh, |_| recipe, &linears, &vars, options, &values)
            .map(drop)
    })?;
    Ok(begun.elapsed().as_secs_f64())
}
fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [folder, ranks, recipe] = args.as_slice() else {
        return Err("give FOLDER RANKS RECIPE".into());
    };
    let folder = Path::new(folder);
    // The first read brings the files into memory, so that both that are timed read from there.
    cat(folder)?;
    let (bytes, plain) = cat(folder)?;
    let seconds = read(folder, ranks.parse()?, recipe.parse()?)?;
    let rate = |seconds: f64| bytes as f64 / 1e9 / seconds;
    println!(
        "{bytes} bytes; plain {:.2} GB/s; {ranks} ranks {:.2} GB/s",
        rate(plain),
        rate(seconds)
    );
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM"));
    println!("{}", peak.unwrap_or("no VmHWM on this system"));
    Ok(())
}
