//! The commands, and the claims that they apply to. A native plugin of the tests uses the same ones.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Outcome that the driver produces for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Success.
    Ok,
    /// A permanent refusal.
    RefusePermanent,
    /// A temporary refusal.
    RefuseTransient,
    /// A temporary refusal with a retry after an hour.
    RefuseAnHour,
    /// The driver crashes in the middle of the call.
    Die,
    /// No answer until the driver has prepared the claim [`RELEASE_UID`].
    Hold,
    /// Success, and ends every [`Hold`](Command::Hold).
    Release,
    /// The answer omits the claim.
    Skip,
    /// The answer contains the claim twice.
    Twice,
    /// The answer also contains a claim that is not in the call.
    Stranger,
    /// The answer contains a claim that is not in the call instead.
    WrongClaim,
    /// The answer exceeds the bounds.
    Huge,
    /// The answer names a device that is not allocated to the claim.
    OtherDevice,
    /// Computes until the host stops it.
    Spin,
    /// Allocates memory until the host stops it.
    Grow,
    /// Logs until the host stops it.
    Flood,
}

/// The claim that ends every [`Command::Hold`] of a driver that has prepared it.
pub const RELEASE_UID: &str = "claim-release";

/// The claim that is in no call.
pub const STRANGER_UID: &str = "claim-of-another";

impl Command {
    /// Every command with the name of the claims that it applies to.
    pub const ALL: [(&str, Command); 16] = [
        ("ok", Command::Ok),
        ("refuse-permanent", Command::RefusePermanent),
        ("refuse-transient", Command::RefuseTransient),
        ("refuse-an-hour", Command::RefuseAnHour),
        ("die", Command::Die),
        ("hold", Command::Hold),
        ("release", Command::Release),
        ("skip", Command::Skip),
        ("twice", Command::Twice),
        ("stranger", Command::Stranger),
        ("wrong-claim", Command::WrongClaim),
        ("huge", Command::Huge),
        ("other-device", Command::OtherDevice),
        ("spin", Command::Spin),
        ("grow", Command::Grow),
        ("flood", Command::Flood),
    ];

    /// Returns the command for a claim of this name: the name, or the name without `-2`.
    pub fn named(claim: &str) -> Command {
        let name = claim.strip_suffix("-2").unwrap_or(claim);
        Command::ALL
            .iter()
            .find(|(command, _)| *command == name)
            .map_or(Command::Ok, |(_, command)| *command)
    }
}

/// A defect of the driver itself, which conformance cases have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Only the discovery at load finds devices.
    DevicesOnlyAtLoad,
    /// The name of the pool has a part of the boot ID.
    PoolOfTheBoot,
    /// A variable of the container has the boot ID.
    EditsOfTheBoot,
    /// Of several claims in a call only the first has an outcome.
    OnlyTheFirstOfACall,
    /// If one claim of a call is refused, all are.
    OneRefusalFailsAll,
    /// Every prepare takes most of the memory that a call may have.
    NearTheMemoryLimit,
}

/// The file below `/sys` that the driver may write.
pub const WRITABLE: &str = "class/scripted/value";

/// A write below `/sys` during prepare.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedWrite {
    pub path: String,
    pub value: String,
}

/// The driver's config: commands for claims with other names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// The driver publishes it, so that a test sees that the config is active.
    pub generation: u32,
    /// Number of additional devices, `device-0` and on, for claims whose names are not commands.
    pub devices: u32,
    /// Every successful prepare writes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<ScriptedWrite>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
    /// Every successful prepare reports a status of each device.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub report: bool,
    /// Behaviour of prepare by claim name.
    pub prepare: BTreeMap<String, Command>,
    /// Behaviour of unprepare by claim name; every other unprepare succeeds.
    pub unprepare: BTreeMap<String, Command>,
    /// While the driver has prepared a claim of this UID, every discovery crashes it.
    pub blinded_by: Option<String>,
}

impl Script {
    pub fn for_prepare(&self, claim: &str) -> Command {
        self.prepare
            .get(claim)
            .copied()
            .unwrap_or_else(|| Command::named(claim))
    }

    pub fn for_unprepare(&self, claim: &str) -> Command {
        self.unprepare.get(claim).copied().unwrap_or(Command::Ok)
    }
}
