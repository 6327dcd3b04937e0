//! The words, and which claim they are for. A native plugin of the tests plays the same ones.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a driver does with a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// It goes well.
    Ok,
    /// Refused for good.
    RefusePermanent,
    /// Refused for now.
    RefuseTransient,
    /// Refused for an hour.
    RefuseAnHour,
    /// The driver ends in the middle of the call.
    Die,
    /// No answer until the driver holds the claim [`RELEASE_UID`].
    Hold,
    /// Goes well, and ends every [`Hold`](Word::Hold).
    Release,
    /// The claim is left out of the answer.
    Skip,
    /// The claim is in the answer twice.
    Twice,
    /// A claim that nobody asked for is in the answer as well.
    Stranger,
    /// A claim that nobody asked for is in the answer instead.
    WrongClaim,
    /// The answer is beyond the bounds.
    Huge,
    /// The answer names a device that is not allocated to the claim.
    OtherDevice,
    /// Computes until it is stopped.
    Spin,
    /// Wants more and more memory until it is stopped.
    Grow,
    /// Logs until it is stopped.
    Flood,
}

/// The claim that ends every [`Word::Hold`] of a driver that has prepared it.
pub const RELEASE_UID: &str = "claim-release";

/// The claim that nobody asks for.
pub const STRANGER_UID: &str = "claim-of-somebody-else";

impl Word {
    /// Every word with the name of the claims that it is for.
    pub const ALL: [(&str, Word); 16] = [
        ("ok", Word::Ok),
        ("refuse-permanent", Word::RefusePermanent),
        ("refuse-transient", Word::RefuseTransient),
        ("refuse-an-hour", Word::RefuseAnHour),
        ("die", Word::Die),
        ("hold", Word::Hold),
        ("release", Word::Release),
        ("skip", Word::Skip),
        ("twice", Word::Twice),
        ("stranger", Word::Stranger),
        ("wrong-claim", Word::WrongClaim),
        ("huge", Word::Huge),
        ("other-device", Word::OtherDevice),
        ("spin", Word::Spin),
        ("grow", Word::Grow),
        ("flood", Word::Flood),
    ];

    /// The word for a claim of this name: the name, or the name without `-2`.
    pub fn named(claim: &str) -> Word {
        let name = claim.strip_suffix("-2").unwrap_or(claim);
        Word::ALL.iter().find(|(word, _)| *word == name).map_or(Word::Ok, |(_, word)| *word)
    }
}

/// The file below `/sys` that the driver may write.
pub const WRITABLE: &str = "class/scripted/value";

/// What a prepare writes below `/sys`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedWrite {
    pub path: String,
    pub value: String,
}

/// The driver's config: words for claims whose names are others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Published, so that a test sees that the script is in use.
    pub generation: u32,
    /// How many devices there are, `device-0` and on, for claims whose names are no words.
    pub devices: u32,
    /// Written by each prepare that goes well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<ScriptedWrite>,
    /// By claim name.
    pub prepare: BTreeMap<String, Word>,
    /// By claim name; every other unprepare goes well.
    pub unprepare: BTreeMap<String, Word>,
    /// While the driver holds a claim of this UID every look at its devices ends it.
    pub blinded_by: Option<String>,
}

impl Script {
    pub fn for_prepare(&self, claim: &str) -> Word {
        self.prepare.get(claim).copied().unwrap_or_else(|| Word::named(claim))
    }

    pub fn for_unprepare(&self, claim: &str) -> Word {
        self.unprepare.get(claim).copied().unwrap_or(Word::Ok)
    }
}
