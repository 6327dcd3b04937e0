//! The AllocationResult of a claim, from the devices that were chosen for it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult,
    DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::capacity::Amount;
use super::inventory::{Inventory, Offered};
use super::node::NAME_FIELD;
use super::request::{Requests, Slot};
use super::search::Chosen;

/// A chosen device with the slot that it was chosen for.
struct Pick<'a> {
    slot: &'a Slot<'a>,
    device: &'a Offered,
    share: Option<&'a [Amount]>,
}

/// Returns the result. Fails with a sentence about a slice whose node selector a result cannot have.
pub(super) fn build(
    claim: &ResourceClaim,
    requests: &Requests<'_>,
    inventory: &Inventory,
    chosen: &[Chosen],
    now: Timestamp,
    share_ids: &mut dyn FnMut() -> String,
) -> Result<AllocationResult, String> {
    let picks: Vec<Pick<'_>> = chosen
        .iter()
        .filter_map(|chosen| {
            Some(Pick {
                slot: requests.slot(chosen.slot)?,
                device: inventory.device(chosen.device)?,
                share: chosen.share.as_deref(),
            })
        })
        .collect();
    let config = config(claim, &slots_used(requests, &picks));
    let devices = DeviceAllocationResult {
        config: (!config.is_empty()).then_some(config),
        results: Some(picks.iter().map(|pick| pick.result(share_ids)).collect()),
    };
    Ok(AllocationResult {
        allocation_timestamp: Some(Time(now)),
        devices: Some(devices),
        node_selector: node_selector(&picks, &inventory.node.name)?,
    })
}

impl Pick<'_> {
    fn result(&self, share_ids: &mut dyn FnMut() -> String) -> DeviceRequestAllocationResult {
        let device = self.device.device();
        DeviceRequestAllocationResult {
            admin_access: self.slot.admin_access.then_some(true),
            binding_conditions: device.binding_conditions.clone(),
            binding_failure_conditions: device.binding_failure_conditions.clone(),
            consumed_capacity: self.consumed(),
            device: device.name.clone(),
            driver: self.device.driver().to_owned(),
            pool: self.device.pool().to_owned(),
            request: self.slot.name.clone(),
            share_id: self.share.map(|_| share_ids()),
            tolerations: self.slot.tolerations.cloned(),
        }
    }

    fn consumed(&self) -> Option<BTreeMap<String, Quantity>> {
        let capacities = self.device.capacities.as_deref().unwrap_or_default();
        let amounts = capacities.iter().zip(self.share?);
        let consumed: BTreeMap<_, _> = amounts
            .map(|(capacity, amount)| (capacity.name.clone(), Quantity(amount.text.clone())))
            .collect();
        (!consumed.is_empty()).then_some(consumed)
    }
}

/// Returns one slot of each request: its only one, or the sub-request that was chosen.
fn slots_used<'a>(requests: &'a Requests<'a>, picks: &[Pick<'_>]) -> Vec<&'a Slot<'a>> {
    requests
        .slots
        .iter()
        .filter(|slot| {
            !slot.is_sub_request || picks.iter().any(|pick| pick.slot.number == slot.number)
        })
        .collect()
}

/// Returns the configurations of the classes, in the order in which requests use them, and then those of the claim. One for all requests
/// names none.
fn config(claim: &ResourceClaim, slots: &[&Slot<'_>]) -> Vec<DeviceAllocationConfiguration> {
    let mut configs = Vec::new();
    for (number, slot) in slots.iter().enumerate() {
        if slots
            .iter()
            .take(number)
            .any(|earlier| class_name(earlier) == class_name(slot))
        {
            continue;
        }
        let same = slots
            .iter()
            .filter(|other| class_name(other) == class_name(slot));
        let requests: Vec<String> = same.map(|other| other.name.clone()).collect();
        configs.extend(slot.class.spec.config.iter().flatten().map(|config| {
            DeviceAllocationConfiguration {
                opaque: config.opaque.clone(),
                requests: Some(requests.clone()),
                source: "FromClass".to_owned(),
            }
        }));
    }
    let of_claim = claim
        .spec
        .devices
        .as_ref()
        .and_then(|devices| devices.config.as_deref())
        .unwrap_or_default();
    for config in of_claim {
        let requests = config.requests.as_deref().unwrap_or_default();
        if requests.is_empty() || slots.iter().any(|slot| slot.is_named_in(requests)) {
            configs.push(DeviceAllocationConfiguration {
                opaque: config.opaque.clone(),
                requests: config.requests.clone(),
                source: "FromClaim".to_owned(),
            });
        }
    }
    for config in &mut configs {
        let requests = config
            .requests
            .take()
            .filter(|requests| !requests.is_empty());
        config.requests =
            requests.filter(|requests| !slots.iter().all(|slot| slot.is_named_in(requests)));
    }
    configs
}

fn class_name(slot: &Slot<'_>) -> Option<String> {
    slot.class.metadata.name.clone()
}

/// Returns where the devices can be used: on this node if one of them is local to it or binds to it, else where the node selectors of all
/// devices select; nothing if that is everywhere.
fn node_selector(picks: &[Pick<'_>], node: &str) -> Result<Option<NodeSelector>, String> {
    let mut together = NodeSelectorTerm::default();
    for pick in picks {
        let (spec, device) = (&pick.device.slice().spec, pick.device.device());
        let (node_name, selector) = match spec.per_device_node_selection {
            Some(true) => (&device.node_name, &device.node_selector),
            _ => (&spec.node_name, &spec.node_selector),
        };
        if node_name.is_some() || device.binds_to_node == Some(true) {
            let field = NodeSelectorRequirement {
                key: NAME_FIELD.to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![node.to_owned()]),
            };
            let term = NodeSelectorTerm {
                match_fields: Some(vec![field]),
                ..Default::default()
            };
            return Ok(Some(NodeSelector {
                node_selector_terms: vec![term],
            }));
        }
        match selector
            .as_ref()
            .map_or(&[][..], |selector| &selector.node_selector_terms)
        {
            [] => {}
            [term] => {
                merge(&term.match_fields, &mut together.match_fields);
                merge(&term.match_expressions, &mut together.match_expressions);
            }
            terms => {
                return Err(format!(
                    "the node selector of device {} has {} terms, and one is allowed",
                    pick.device,
                    terms.len()
                ));
            }
        }
    }
    let everywhere = together.match_fields.is_none() && together.match_expressions.is_none();
    Ok((!everywhere).then(|| NodeSelector {
        node_selector_terms: vec![together],
    }))
}

/// Adds the requirements that are not there yet. The order of their values makes no difference.
fn merge(
    from: &Option<Vec<NodeSelectorRequirement>>,
    to: &mut Option<Vec<NodeSelectorRequirement>>,
) {
    for requirement in from.iter().flatten() {
        let is_known = to.iter().flatten().any(|known| {
            known.key == requirement.key
                && known.operator == requirement.operator
                && sorted_values(known) == sorted_values(requirement)
        });
        if !is_known {
            to.get_or_insert_default().push(requirement.clone());
        }
    }
}

fn sorted_values(requirement: &NodeSelectorRequirement) -> Vec<String> {
    let mut values = requirement.values.clone().unwrap_or_default();
    values.sort_unstable();
    values.dedup();
    values
}
