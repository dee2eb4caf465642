//! [`ModelFolder`]: the Hugging Face folder of `--model`.

use crate::files::read_json;
use crate::usage::{UsageError, input_error};
use anyhow::{Context, Result};
use lowp_file::Hub;
use lowp_file::hub::CARRIED;
use lowp_train::Model;
use lowp_transformer::GptConfig;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A model that runs begin with.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    path: PathBuf,
    /// Its `config.json`, without what it says of quantized weights.
    pub(crate) json: Value,
    /// Its weights, unless a run begins with random ones.
    pub(crate) hub: Option<Hub>,
}

impl ModelFolder {
    /// The folder at `path`, and the network that it describes, for sequences of `seq` tokens.
    pub(crate) fn open(
        path: &Path,
        seq: Option<usize>,
        from_scratch: bool,
    ) -> Result<(Self, GptConfig)> {
        let file = path.join("config.json");
        let name = file.display().to_string();
        let mut json = read_json("--model", &name)?;
        let config = GptConfig::of_hub(&name, &json, seq);
        let config = config.map_err(|error| UsageError::new(error.to_string()))?;
        if let Some(json) = json.as_object_mut() {
            json.remove("quantization_config");
        }
        let hub = match from_scratch {
            true => None,
            false => Some(Hub::open(path)?),
        };
        let path = path.to_owned();
        let folder = Self { path, json, hub };
        folder.check(&config)?;
        Ok((folder, config))
    }

    /// Checks that all parameters of the network are there.
    fn check(&self, config: &GptConfig) -> Result<()> {
        let Some(hub) = &self.hub else {
            return Ok(());
        };
        let values = lowp_file::Values::new(hub)?;
        let linears = config.linears().into_iter().map(|linear| linear.name);
        let vars = config.vars().into_iter().map(|var| var.name);
        let lacks = |name: &String| !values.has(name);
        match linears.chain(vars).find(lacks) {
            Some(name) => Err(input_error(format!(
                "--model {}: there is no tensor '{name}', which config.json asks for; give a whole model, or --from-scratch",
                self.path.display()
            ))),
            None => Ok(()),
        }
    }

    /// Copies what exports carry along, such as the tokenizer, to the folder `run` of a run's checkpoints.
    pub(crate) fn carry(&self, run: &Path) -> Result<()> {
        let Some(hub) = &self.hub else {
            let hub = lowp_file::hub::OtherFiles::next_to(&self.path)?;
            return copy(&hub, run);
        };
        copy(&hub.other_files, run)
    }
}

fn copy(files: &lowp_file::hub::OtherFiles, run: &Path) -> Result<()> {
    let folder = run.join(CARRIED);
    let cannot = || format!("cannot write {}", folder.display());
    fs::create_dir_all(&folder).with_context(cannot)?;
    for (name, path) in files.others() {
        fs::copy(path, folder.join(name)).with_context(cannot)?;
    }
    Ok(())
}
