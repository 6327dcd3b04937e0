//! The rules of a pod that matter to its devices: its containers have names and images, and its claims fit together.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::fields::{Causes, list, not_found, text};
use super::names;
use crate::status::Cause;

/// Checks the spec of a pod.
pub(super) fn check(causes: &mut Causes, spec: &Value) {
    claims(causes, list(spec, "resourceClaims"));
    let claims: BTreeSet<&str> = list(spec, "resourceClaims")
        .iter()
        .map(|claim| text(claim, "name"))
        .filter(|name| !name.is_empty())
        .collect();
    if list(spec, "containers").is_empty() {
        causes.push(Cause::required("spec.containers", ""));
    }
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    for key in ["containers", "initContainers"] {
        for (index, container) in list(spec, key).iter().enumerate() {
            let (at, name) = (format!("spec.{key}[{index}]"), text(container, "name"));
            match name {
                "" => causes.push(Cause::required(format!("{at}.name"), "")),
                name => names::refuse(causes, &format!("{at}.name"), name, names::label(name)),
            }
            if text(container, "image").is_empty() {
                causes.push(Cause::required(format!("{at}.image"), ""));
            }
            references(
                causes,
                &format!("{at}.resources.claims"),
                list(&container["resources"], "claims"),
                &claims,
            );
            if !taken.insert(name) {
                causes.push(Cause::duplicate(format!("{at}.name"), json!(name)));
            }
        }
    }
    let node = text(spec, "nodeName");
    if !node.is_empty() {
        names::refuse(causes, "spec.nodeName", node, names::subdomain(node));
    }
}

/// The claims of the pod: each has a name of its own and is either there or made of a template.
fn claims(causes: &mut Causes, claims: &[Value]) {
    const SOURCES: [&str; 2] = ["resourceClaimName", "resourceClaimTemplateName"];
    let mut taken = BTreeSet::new();
    for (index, claim) in claims.iter().enumerate() {
        let (at, name) = (format!("spec.resourceClaims[{index}]"), text(claim, "name"));
        if name.is_empty() {
            causes.push(Cause::required(format!("{at}.name"), ""));
        } else if taken.insert(name) {
            names::refuse(causes, &format!("{at}.name"), name, names::label(name));
        } else {
            causes.push(Cause::duplicate(format!("{at}.name"), json!(name)));
        }
        let given: Vec<&str> = SOURCES
            .into_iter()
            .filter(|source| !claim[*source].is_null())
            .collect();
        if given.len() != 1 {
            let why = "must have one of `resourceClaimName` and `resourceClaimTemplateName`";
            causes.push(Cause::invalid(&at, json!(given), why));
        }
        for source in given {
            let name = text(claim, source);
            names::refuse(
                causes,
                &format!("{at}.{source}"),
                name,
                names::subdomain(name),
            );
        }
    }
}

/// The claims of a container: each is one of the pod's, and none is named twice, as a whole or by one of its requests.
fn references(causes: &mut Causes, at: &str, references: &[Value], claims: &BTreeSet<&str>) {
    let mut taken: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (index, reference) in references.iter().enumerate() {
        let field = format!("{at}[{index}]");
        let (name, request) = (text(reference, "name"), text(reference, "request"));
        if name.is_empty() {
            causes.push(Cause::required(field, ""));
            continue;
        }
        if taken.contains(&(name, ""))
            || (request.is_empty() && taken.iter().any(|(other, _)| *other == name))
        {
            causes.push(Cause::duplicate(&field, json!(name)));
        } else if !request.is_empty() {
            names::refuse(
                causes,
                &format!("{field}.request"),
                request,
                names::label(request),
            );
            if taken.contains(&(name, request)) {
                causes.push(Cause::duplicate(&field, json!(format!("{name}/{request}"))));
            }
        }
        taken.insert((name, request));
        if !claims.contains(name) {
            let known = match claims.is_empty() {
                true => " which is empty".to_owned(),
                false => format!(
                    ": {}",
                    claims.iter().copied().collect::<Vec<_>>().join(", ")
                ),
            };
            causes.push(not_found(
                field,
                name,
                &format!("must be one of the names in pod.spec.resourceClaims{known}"),
            ));
        }
    }
}
