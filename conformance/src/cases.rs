//! The code of the cases, and what they know of the driver before they begin.

mod conduct;
mod crash;
mod device_plugin;
mod features;
mod idempotency;
mod slices;
mod wire;

use std::time::Duration;

use anyhow::Result;
use futures::future::BoxFuture;
use nodedock_proto::kubelet::device_plugin::v1beta1::Empty;
use serde_json::Value;
use tokio::time::Instant;

use crate::Target;
use crate::list::Case;
use crate::published::devices;
use crate::report::Outcome;
use crate::test_node::TestNode;

pub(crate) type Run = for<'a> fn(&'a mut TestNode, &'a Facts) -> BoxFuture<'a, Result<Outcome>>;

/// The code of each case by its ID.
pub(crate) fn all() -> Vec<(&'static str, Run)> {
    let levels = [
        wire::CASES,
        idempotency::CASES,
        crash::CASES,
        slices::CASES,
        features::CASES,
        conduct::CASES,
        device_plugin::CASES,
    ];
    levels.concat()
}

/// `"id" => function` of a level.
macro_rules! level {
    ($($id:literal => $run:ident,)*) => {
        pub(super) const CASES: &[(&str, super::Run)] =
            &[$(($id, |node, facts| ::futures::FutureExt::boxed($run(node, facts)))),*];
    };
}
pub(crate) use level;

/// A driver that registers as a DRA driver may register as a device plugin as well, and the other way round, within this time.
const BESIDE: Duration = Duration::from_secs(1);

/// Observations about a driver from one start of it.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    services: Vec<String>,
    /// Those under the registered name.
    slices: Vec<Value>,
    /// True if the driver wrote a slice, regardless of the response and of the driver that the slice names.
    publishes: bool,
    devices: usize,
    is_dra: bool,
    is_device_plugin: bool,
    prefers: bool,
    is_program: bool,
    health_may_be_silent: bool,
    knows_admin_access: bool,
    names_cdi: bool,
    names_state: bool,
    names_instance: bool,
    is_in_daemon: bool,
    /// Why nothing registered, and what was exchanged.
    pub(crate) failure: Option<(String, Vec<String>)>,
}

impl Facts {
    /// Starts the driver once and looks at what it does.
    pub(crate) async fn learn(node: &mut TestNode) -> Self {
        let mut facts = Self {
            knows_admin_access: node.options.admin_access,
            ..Self::default()
        };
        if let Target::Program(program) = &node.options.target {
            facts.is_program = true;
            facts.health_may_be_silent = program.health_may_be_silent;
            facts.names_cdi = program.names("cdi") || program.names("root");
            facts.names_state = program.names("state");
            facts.names_instance = program.names("instance");
            facts.is_in_daemon = program.daemon.is_some();
        }
        if let Err(error) = facts.look(node).await {
            facts.failure = Some((format!("{error:#}"), node.messages()));
        }
        facts
    }

    async fn look(&mut self, node: &mut TestNode) -> Result<()> {
        node.start()?;
        let mut found = node.announced().await?;
        let beside = Instant::now() + BESIDE;
        if found.is_none() {
            tokio::time::sleep_until(beside).await;
            // no error: a driver that does not register is reported by the case that needs it
            found = node.look_for_info().await.ok();
        }
        if let Some((_, info)) = found {
            self.is_dra = true;
            self.slices = node.slices(&info.name).await;
            if self.slices.is_empty() {
                self.slices = node.slices_now(&info.name);
            }
            self.publishes = slices::are_written(node);
            self.services = info.supported_versions;
            let named = node.options.devices.len();
            self.devices = if named > 0 {
                named
            } else {
                devices(&self.slices).len()
            };
        }
        tokio::time::sleep_until(beside).await;
        if node.registrations.newest().is_some() {
            self.is_device_plugin = true;
            let (_, mut client) = node.device_plugin().await?;
            let asking = client.get_device_plugin_options(Empty {});
            let options = device_plugin::within(node, "GetDevicePluginOptions", asking).await;
            self.prefers = options.is_ok_and(|options| options.get_preferred_allocation_available);
        }
        Ok(())
    }

    /// Why a case is not about this driver.
    pub(crate) fn missing(&self, case: &Case) -> Option<Outcome> {
        if self.failure.is_some() && case.id != "wire.registers" {
            return Some(Outcome::NotDeclared(Outcome::NOTHING_REGISTERED.to_owned()));
        }
        let conditions = case
            .condition
            .iter()
            .flat_map(|condition| condition.split('+'));
        let missing = conditions
            .filter_map(|condition| self.lacks(condition))
            .next()?;
        Some(Outcome::NotDeclared(missing.to_owned()))
    }

    /// Why a directory or value is not known that a command would name.
    fn not_named(&self, named: &'static str) -> &'static str {
        match (self.is_program, self.is_in_daemon) {
            (false, _) => "it was started by others",
            (true, true) => "the daemon has it, not the driver",
            (true, false) => named,
        }
    }

    fn lacks(&self, condition: &str) -> Option<&'static str> {
        let (holds, why) = match condition {
            "dra" => (self.is_dra, "it is no DRA driver"),
            "cdi" => (
                self.is_dra && self.names_cdi,
                self.not_named("its command does not name {cdi}"),
            ),
            "devices>=2" => (self.devices >= 2, "it has fewer than two devices"),
            "v1beta1" => (
                self.services.iter().any(|name| name == "v1beta1.DRAPlugin"),
                "it does not list v1beta1.DRAPlugin",
            ),
            "restart" => (
                self.is_program && (self.is_dra || self.is_device_plugin),
                "it was started by others",
            ),
            "state" => (
                self.is_dra && self.names_state,
                self.not_named("its command does not name {state}"),
            ),
            "instance" => (
                self.is_dra && self.names_instance,
                self.not_named("its command does not name {instance}"),
            ),
            "daemon" => (self.is_in_daemon, "no daemon runs it"),
            "slices" => (self.publishes, "it publishes no ResourceSlices"),
            "health" => (
                self.services
                    .iter()
                    .any(|name| name.ends_with("DRAResourceHealth")),
                "it lists no DRAResourceHealth",
            ),
            "metadata" => (
                self.is_dra && self.names_cdi,
                self.not_named("its command does not name {cdi}"),
            ),
            "counters" => (
                self.devices_have("consumesCounters"),
                "its devices consume no counters",
            ),
            "taints" => (self.devices_have("taints"), "its devices have no taints"),
            "admin-access" => (
                self.is_dra && self.knows_admin_access,
                "it is not said to know admin access",
            ),
            "device-plugin" => (self.is_device_plugin, "it is no device plugin"),
            "preferred" => (self.prefers, "it does not offer preferred allocations"),
            _ => (false, "this runner does not know its condition"),
        };
        (!holds).then_some(why)
    }

    /// Says if a published device has a list of this name that is not empty.
    fn devices_have(&self, field: &str) -> bool {
        self.slices
            .iter()
            .filter_map(|slice| slice["spec"]["devices"].as_array())
            .flatten()
            .any(|device| {
                device[field]
                    .as_array()
                    .is_some_and(|list| !list.is_empty())
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_condition_is_known() {
        for case in crate::list::cases().unwrap() {
            for condition in case
                .condition
                .iter()
                .flat_map(|condition| condition.split('+'))
            {
                let lacks = Facts::default().lacks(condition);
                assert!(
                    lacks.is_some_and(|why| !why.contains("does not know")),
                    "{}: {condition}",
                    case.id
                );
            }
        }
    }
}
