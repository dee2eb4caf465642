//! How values of other crates are written in the JSON of a [`Config`](crate::Config).

use serde::Serialize;
use serde_json::Value;

use crate::defaults;
use crate::error::TrainError;

/// `value` as JSON, by way of text, so that f32 numbers are those that were given.
pub(crate) fn written(value: &impl Serialize) -> Result<Value, TrainError> {
    Ok(serde_json::from_str(&serde_json::to_string(value)?)?)
}

/// The value of `field` in JSON of older programs, which had no such field.
pub(crate) fn left_out(field: &str) -> Option<f32> {
    match field {
        "beta2" => Some(defaults::beta2()),
        "var_lr" => Some(defaults::var_lr()),
        _ => None,
    }
}

/// One of two values, by its name.
macro_rules! by_name {
    ($module:ident, $type:ty) => {
        pub(crate) mod $module {
            use serde::de::Error;
            use serde::{Deserialize, Deserializer, Serializer};

            const ALL: [$type; 2] = <$type>::ALL;
            const NAMES: [&str; 2] = [ALL[0].name(), ALL[1].name()];

            pub(crate) fn serialize<S: Serializer>(
                value: &$type,
                to: S,
            ) -> Result<S::Ok, S::Error> {
                to.serialize_str(value.name())
            }

            pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
                from: D,
            ) -> Result<$type, D::Error> {
                let name = String::deserialize(from)?;
                let found = ALL.into_iter().find(|value| value.name() == name);
                found.ok_or_else(|| D::Error::unknown_variant(&name, &NAMES))
            }
        }
    };
}

by_name!(sharding, lowp_fsdp::Sharding);
by_name!(grad_wire, lowp_comm::GradWire);

/// `[replicas, shards]`.
pub(crate) mod mesh {
    use lowp_comm::Mesh;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(mesh: &Mesh, to: S) -> Result<S::Ok, S::Error> {
        [mesh.replicate, mesh.shard].serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mesh, D::Error> {
        let [replicate, shard] = Deserialize::deserialize(from)?;
        Ok(Mesh { replicate, shard })
    }
}

/// `true`, `false`, or the number of ranks.
pub(crate) mod reshard {
    use lowp_format::ReshardAfterForward;
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        All(bool),
        Group(usize),
    }

    pub(crate) fn serialize<S: Serializer>(
        policy: &ReshardAfterForward,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match policy {
            ReshardAfterForward::Yes => to.serialize_bool(true),
            ReshardAfterForward::No => to.serialize_bool(false),
            ReshardAfterForward::Group(ranks) => to.serialize_u64(*ranks as u64),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<ReshardAfterForward, D::Error> {
        Ok(match Form::deserialize(from)? {
            Form::All(true) => ReshardAfterForward::Yes,
            Form::All(false) => ReshardAfterForward::No,
            Form::Group(ranks) => ReshardAfterForward::Group(ranks),
        })
    }
}

/// `"exp_avg=bf16,exp_avg_sq=f32"`.
pub(crate) mod state {
    use lowp_optim::StateDtypes;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn is_f32(state: &StateDtypes) -> bool {
        *state == StateDtypes::default()
    }

    pub(crate) fn serialize<S: Serializer>(state: &StateDtypes, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(state)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<StateDtypes, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// `"cosine"`, `"linear"`, or the number of steps of the decay after a stable rate.
pub(crate) mod decay {
    use lowp_optim::Decay;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Name(String),
        Stable(u64),
    }

    pub(crate) fn is_cosine(decay: &Decay) -> bool {
        *decay == Decay::Cosine
    }

    pub(crate) fn serialize<S: Serializer>(decay: &Decay, to: S) -> Result<S::Ok, S::Error> {
        match decay {
            Decay::Stable { decay } => to.serialize_u64(*decay),
            named => to.serialize_str(named.name()),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Decay, D::Error> {
        match Form::deserialize(from)? {
            Form::Stable(decay) => Ok(Decay::Stable { decay }),
            Form::Name(name) => {
                let named = [Decay::Cosine, Decay::Linear];
                let found = named.into_iter().find(|decay| decay.name() == name);
                found.ok_or_else(|| Error::custom(format!("no schedule is called {name}")))
            }
        }
    }
}
