//! Events of `Watch`.

use strum::IntoStaticStr;

/// A change of a driver, a driver's devices, a claim, or the conditions of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub kind: ChangedKind,
    pub name: String,
    pub state: String,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum ChangedKind {
    Driver,
    Device,
    Claim,
    /// The conditions of the node.
    Node,
}

impl ChangedKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
