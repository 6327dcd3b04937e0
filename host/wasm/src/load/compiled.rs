//! A compiled driver, linked: its code can be instantiated, and its exported functions are known.

use wasmtime::component::{Component, Instance, InstancePre};
use wasmtime::{Result, Store};

use crate::bindings::exports::nodedock::driver as exports;
use crate::host_functions::state::CallState;
use crate::limits::limiter::CALL_MEMORIES;
use crate::load::admission::Surface;

/// A compiled driver and where it comes from.
pub(crate) struct Compiled {
    pub(crate) pre: InstancePre<CallState>,
    pub(crate) exports: Exports,
    /// Linear memories of an instance.
    pub(crate) memories: usize,
    pub(crate) surface: Surface,
    /// Digest of the file: `sha256:` and hex.
    pub(crate) digest: String,
    pub(crate) from_cache: bool,
}

/// Linear memories of an instance; the highest possible number where the component does not say.
pub(crate) fn memories(component: &Component) -> usize {
    let required = component
        .resources_required()
        .map(|required| required.num_memories as usize);
    required.unwrap_or(CALL_MEMORIES).clamp(1, CALL_MEMORIES)
}

/// Indices of the driver's functions.
pub(crate) struct Exports {
    pub(crate) identity: exports::identity::GuestIndices,
    pub(crate) discovery: exports::discovery::GuestIndices,
    pub(crate) preparation: exports::preparation::GuestIndices,
    pub(crate) configuration: Option<exports::configuration::GuestIndices>,
    pub(crate) health: Option<exports::health::GuestIndices>,
    pub(crate) left_out: Option<exports::left_out::GuestIndices>,
    pub(crate) scheduling: Option<exports::scheduling::GuestIndices>,
    pub(crate) telemetry: Option<exports::telemetry::GuestIndices>,
}

impl Exports {
    pub(crate) fn new(pre: &InstancePre<CallState>, surface: &Surface) -> Result<Self> {
        let facets = surface.facets();
        let configuration = facets
            .contains(&"configuration")
            .then(|| exports::configuration::GuestIndices::new(pre));
        let health = facets
            .contains(&"health")
            .then(|| exports::health::GuestIndices::new(pre));
        let left_out = facets
            .contains(&"left-out")
            .then(|| exports::left_out::GuestIndices::new(pre));
        let scheduling = facets
            .contains(&"scheduling")
            .then(|| exports::scheduling::GuestIndices::new(pre));
        let telemetry = facets
            .contains(&"telemetry")
            .then(|| exports::telemetry::GuestIndices::new(pre));
        Ok(Self {
            identity: exports::identity::GuestIndices::new(pre)?,
            discovery: exports::discovery::GuestIndices::new(pre)?,
            preparation: exports::preparation::GuestIndices::new(pre)?,
            configuration: configuration.transpose()?,
            health: health.transpose()?,
            left_out: left_out.transpose()?,
            scheduling: scheduling.transpose()?,
            telemetry: telemetry.transpose()?,
        })
    }

    /// Checks the types of all exported functions.
    pub(crate) fn check(&self, store: &mut Store<CallState>, instance: &Instance) -> Result<()> {
        self.identity.load(&mut *store, instance)?;
        self.discovery.load(&mut *store, instance)?;
        self.preparation.load(&mut *store, instance)?;
        self.configuration
            .as_ref()
            .map(|facet| facet.load(&mut *store, instance))
            .transpose()?;
        self.health
            .as_ref()
            .map(|facet| facet.load(&mut *store, instance))
            .transpose()?;
        self.left_out
            .as_ref()
            .map(|facet| facet.load(&mut *store, instance))
            .transpose()?;
        self.scheduling
            .as_ref()
            .map(|facet| facet.load(&mut *store, instance))
            .transpose()?;
        self.telemetry
            .as_ref()
            .map(|facet| facet.load(&mut *store, instance))
            .transpose()?;
        Ok(())
    }
}
