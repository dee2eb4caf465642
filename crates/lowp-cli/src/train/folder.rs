//! [`ModelFolder`]: the Hugging Face folder of `--model`.

use crate::files::read_json;
use crate::usage::{UsageError, input_error};
use anyhow::Result;
use lowp_checkpoint::checksum;
use lowp_file::hub::{CARRIED, OtherFiles};
use lowp_file::{Hub, Values};
use lowp_train::{HubValues, Model};
use lowp_transformer::GptConfig;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model that runs begin with.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    path: PathBuf,
    /// A digest of its whole `config.json`.
    config: String,
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
        let whole = checksum(json.to_string().as_bytes());
        if let Some(json) = json.as_object_mut() {
            json.remove("quantization_config");
        }
        let hub = match from_scratch {
            true => None,
            false => Some(Hub::open(path)?),
        };
        let shown = path.display();
        if let Some(hub) = &hub {
            if let (Some(seq), Some(positions)) = (seq, config.trained_positions(&json)) {
                return Err(input_error(format!(
                    "--seq {seq} is more than max_position_embeddings of --model {shown}, which is {positions}: later positions were never \
                     trained; give --seq {positions} or less, rope_scaling in config.json, or --from-scratch"
                )));
            }
            let linears = config.linears().into_iter().map(|linear| linear.name);
            let vars = config.vars().into_iter().map(|var| var.name);
            let checked = HubValues(Values::new(hub)?).check(&linears.chain(vars).collect());
            checked.map_err(|e| input_error(format!("--model {shown}: {e}, or --from-scratch")))?;
        }
        let folder = Self {
            path: path.to_owned(),
            config: whole,
            json,
            hub,
        };
        Ok((folder, config))
    }

    /// A digest of what runs begin with: config.json and the weights, unless those are random.
    pub(crate) fn digest(&self) -> Result<String> {
        let weights = match &self.hub {
            Some(hub) => format!("weights {}", hub.model.digest()?),
            None => "random weights".to_owned(),
        };
        Ok(format!("config.json {}, {weights}", self.config))
    }

    /// Copies what exports carry along, such as the tokenizer, to the folder `run` of a run's checkpoints.
    pub(crate) fn carry(&self, run: &Path) -> Result<()> {
        let to = run.join(CARRIED);
        match &self.hub {
            Some(hub) => hub.other_files.carry_to(&to)?,
            None => OtherFiles::next_to(&self.path)?.carry_to(&to)?,
        }
        Ok(())
    }
}
