//! What `Watch` tells of.

/// Something changed: a driver, a driver's devices, a claim, or what is wrong with the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub kind: ChangedKind,
    pub name: String,
    pub state: String,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangedKind {
    Driver,
    Device,
    Claim,
    /// What is wrong with the node itself.
    Node,
}

impl ChangedKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Device => "device",
            Self::Claim => "claim",
            Self::Node => "node",
        }
    }
}
