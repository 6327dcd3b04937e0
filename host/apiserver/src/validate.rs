//! The published rules of objects of Kubernetes 1.36, and the defaults of their fields. What is refused, at which field and for which reason is
//! as an API server has it; messages are Nodedock's. Functions are pure: they see one object, the object that it replaces, and at most the
//! namespace.

mod admin;
mod capacity;
mod claim;
mod claim_status;
mod defaults;
mod device;
mod event;
mod expressions;
mod fields;
mod metadata;
mod names;
mod node_selector;
mod parameters;
mod pod;
mod slice;
#[cfg(test)]
mod tests;

use nodedock_model::limit::CLAIM_CONFIGS_MAX;
use serde_json::Value;

pub(crate) use admin::admin_access;
pub(crate) use claim_status::{drop_deallocated_devices, immutable_allocation};
pub(crate) use defaults::defaults;
pub(crate) use event::event;
pub(crate) use expressions::{Compiled, new_expressions};
pub(crate) use parameters::{Verdicts, new_parameters};

use crate::resources::Resource;
use crate::status::Cause;
use fields::{Causes, each, invalid, same, text};

/// Returns the problems of an object that is to be stored, with [`defaults`] set and its name given; `old` is the object that it replaces,
/// and `compiled` has its [`new_expressions`]. A status is checked if it differs from the one before. Never panics, for any `new`.
///
/// Events have further rules, which depend on the group of the request: [`event`]. Admin access of a claim depends on its namespace:
/// [`admin_access`].
pub(crate) fn object(
    resource: &Resource,
    new: &Value,
    old: Option<&Value>,
    compiled: &Compiled,
) -> Vec<Cause> {
    let mut causes = vec![];
    metadata::check(&mut causes, resource, new, old);
    let spec = &new["spec"];
    match resource.plural {
        "resourceslices" => slice::check(&mut causes, spec, old.map(|old| &old["spec"])),
        "resourceclaims" => claim(&mut causes, new, old, compiled),
        "resourceclaimtemplates" => template(&mut causes, spec, old, compiled),
        "deviceclasses" => class(&mut causes, spec, old.map(|old| &old["spec"]), compiled),
        "devicetaintrules" => taint_rule(&mut causes, new),
        "pods" => pod::check(&mut causes, spec),
        _ => {}
    }
    causes
}

/// Returns the cause with which a write is refused, as an apply is, if it names another UID than that of the existing object.
pub(crate) fn immutable_uid(uid: &Value) -> Cause {
    Cause::invalid("metadata.uid", uid, "field is immutable")
}

fn claim(causes: &mut Causes, new: &Value, old: Option<&Value>, compiled: &Compiled) {
    match old {
        Some(old) => unchanged(causes, &new["spec"], &old["spec"]),
        None => claim::spec(causes, "spec", &new["spec"], compiled),
    }
    if old.is_none_or(|old| new["status"] != old["status"]) {
        claim_status::check(causes, new, old);
    }
}

/// A spec that cannot change is not checked again: nothing else could be done about it.
fn unchanged(causes: &mut Causes, spec: &Value, old: &Value) {
    if !same(spec, old) {
        causes.push(Cause::immutable("spec"));
    }
}

fn template(causes: &mut Causes, spec: &Value, old: Option<&Value>, compiled: &Compiled) {
    match old {
        Some(old) => unchanged(causes, spec, &old["spec"]),
        None => {
            metadata::of_template(causes, "spec.metadata", &spec["metadata"]);
            claim::spec(causes, "spec.spec", &spec["spec"], compiled);
        }
    }
}

fn class(causes: &mut Causes, spec: &Value, old: Option<&Value>, compiled: &Compiled) {
    claim::selectors(causes, "spec", spec, compiled);
    let is_new = old.is_none_or(|old| !same(&old["config"], &spec["config"]));
    each(
        causes,
        "spec",
        spec,
        "config",
        CLAIM_CONFIGS_MAX,
        |causes, at, config| {
            claim::configuration(causes, at, config, is_new);
        },
    );
    let name = text(spec, "extendedResourceName");
    if !spec["extendedResourceName"].is_null() && !is_extended_resource(name) {
        let field = "spec.extendedResourceName";
        causes.push(invalid(
            field,
            name,
            "must be a valid extended resource name",
        ));
    }
}

/// Returns true if the name of a resource has a domain that is not one of Kubernetes.
fn is_extended_resource(name: &str) -> bool {
    const QUOTA: &str = "requests.";
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with(QUOTA)
        && names::label_key(&format!("{QUOTA}{name}")).is_none()
}

fn taint_rule(causes: &mut Causes, rule: &Value) {
    let (selector, at) = (&rule["spec"]["deviceSelector"], "spec.deviceSelector");
    if !selector["driver"].is_null() {
        names::driver(causes, &format!("{at}.driver"), text(selector, "driver"));
    }
    if !selector["pool"].is_null() {
        names::pool(causes, &format!("{at}.pool"), text(selector, "pool"));
    }
    if !selector["device"].is_null() {
        let name = text(selector, "device");
        names::refuse(causes, &format!("{at}.device"), name, names::label(name));
    }
    claim::taint(causes, "spec.taint", &rule["spec"]["taint"]);
    claim_status::conditions(causes, "status", &rule["status"]);
}
