//! Parameters of claims and classes: how a GPU is shared.

use nodedock_sdk::{Problem, parse_json};
use serde::{Deserialize, Serialize};

const API_VERSION: &str = "mock-gpu.nodedock.dev/v1";
const KIND: &str = "GpuConfig";

/// Unchecked parameters; [`Parameters::sharing`] interprets them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Parameters {
    api_version: Option<String>,
    kind: Option<String>,
    sharing: Option<SharingParameters>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SharingParameters {
    strategy: Strategy,
    time_slicing: Option<TimeSlicing>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
enum Strategy {
    Exclusive,
    TimeSlicing,
    SpacePartitioning,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeSlicing {
    #[serde(default)]
    interval: Interval,
}

/// Length of a time slice on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) enum Interval {
    #[default]
    Default,
    Short,
    Medium,
    Long,
}

/// The way in which claims share a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) enum Sharing {
    Exclusive,
    TimeSlicing(Interval),
    SpacePartitioning,
}

impl Parameters {
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        parse_json("bad-parameters", "parameters of mock-gpu", text)
    }

    /// Parameters without `sharing` mean exclusive use.
    pub(crate) fn sharing(self) -> Result<Sharing, Problem> {
        check_type("apiVersion", self.api_version.as_deref(), API_VERSION)?;
        check_type("kind", self.kind.as_deref(), KIND)?;
        let Some(sharing) = self.sharing else {
            return Ok(Sharing::Exclusive);
        };
        match (sharing.strategy, sharing.time_slicing) {
            (Strategy::TimeSlicing, slicing) => Ok(Sharing::TimeSlicing(
                slicing.map_or(Interval::Default, |slicing| slicing.interval),
            )),
            (Strategy::Exclusive, None) => Ok(Sharing::Exclusive),
            (Strategy::SpacePartitioning, None) => Ok(Sharing::SpacePartitioning),
            (strategy, Some(_)) => {
                let message = format!(
                    "sharing.timeSlicing is for strategy TimeSlicing, not for {strategy:?}"
                );
                Err(Problem::invalid("strategy-mismatch", message))
            }
        }
    }
}

fn check_type(field: &str, is: Option<&str>, should: &str) -> Result<(), Problem> {
    match is {
        Some(is) if is != should => Err(Problem::invalid(
            "unknown-type",
            format!("{field} is {is:?}, the driver knows {should:?}"),
        )),
        _ => Ok(()),
    }
}

impl Sharing {
    /// Returns the default without parameters.
    pub(crate) fn default_of(shared: bool) -> Self {
        if shared {
            Sharing::TimeSlicing(Interval::Default)
        } else {
            Sharing::Exclusive
        }
    }

    pub(crate) fn strategy(&self) -> &'static str {
        match self {
            Sharing::Exclusive => "Exclusive",
            Sharing::TimeSlicing(_) => "TimeSlicing",
            Sharing::SpacePartitioning => "SpacePartitioning",
        }
    }

    pub(crate) fn interval(&self) -> Option<&'static str> {
        match self {
            Sharing::TimeSlicing(Interval::Default) => Some("Default"),
            Sharing::TimeSlicing(Interval::Short) => Some("Short"),
            Sharing::TimeSlicing(Interval::Medium) => Some("Medium"),
            Sharing::TimeSlicing(Interval::Long) => Some("Long"),
            Sharing::Exclusive | Sharing::SpacePartitioning => None,
        }
    }

    /// Returns whether two claims with these settings may use the same device.
    pub(crate) fn goes_with(&self, other: &Sharing) -> bool {
        self == other && *self != Sharing::Exclusive
    }
}
