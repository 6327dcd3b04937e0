//! The host's own driver of devices in CDI specs, by the config.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::config::Config;
use nodedock_core::cdi_driver::{CdiAnswer, CdiDriver, CdiDriverParts, CdiDriverSettings};
use nodedock_core::records::SharedClaimTable;
use nodedock_model::{DriverKind, DriverName};
use nodedock_wasm::registry::wasm_files::WasmFiles;

/// Registers the driver of the config. A name that it had before stays as long as claims have it, so that these can be unprepared.
pub(super) fn register(
    config: &Config,
    wasm: &WasmFiles,
    claims: &SharedClaimTable,
) -> Result<Option<CdiDriver>> {
    let settings = config.drivers.cdi.clone();
    let mut earlier = names_of_claims(claims);
    if let Some(settings) = &settings {
        earlier.remove(&settings.driver);
    }
    for driver in earlier {
        let without_specs = CdiDriverSettings {
            driver,
            kinds: None,
            directories: Vec::new(),
            answer: CdiAnswer::Names,
        };
        // It is in the registry, and has nothing to publish.
        drop(CdiDriver::register(parts(config, wasm)?, without_specs));
    }
    let register = |settings| Ok(CdiDriver::register(parts(config, wasm)?, settings));
    settings.map(register).transpose()
}

fn parts(config: &Config, wasm: &WasmFiles) -> Result<CdiDriverParts> {
    let hardware = &config.hardware;
    let kubernetes = config.kubernetes.as_ref();
    Ok(CdiDriverParts {
        registry: wasm.registry.clone(),
        conditions: wasm.conditions.clone(),
        sysfs: hardware
            .open_sys()
            .with_context(|| format!("open {}", hardware.sys().display()))?,
        numa_node_form: kubernetes
            .map(|node| node.numa_node_form)
            .unwrap_or_default(),
        hardware: hardware.clone(),
    })
}

/// Drivers of claims that a CDI driver prepared.
fn names_of_claims(claims: &SharedClaimTable) -> BTreeSet<DriverName> {
    let claims = claims.lock();
    let parts = claims.claims().flat_map(|claim| &claim.drivers);
    let of_cdi = parts.filter(|(_, part)| {
        let by = part.by.as_ref();
        by.is_some_and(|by| by.kind == DriverKind::Cdi)
    });
    of_cdi.map(|(driver, _)| driver.clone()).collect()
}
