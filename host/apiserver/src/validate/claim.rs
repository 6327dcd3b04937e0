//! The rules of what a claim asks for. Templates have the same, and classes share those of selectors and parameters.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_model::check;
use nodedock_model::limit::{
    CLAIM_CONFIGS_MAX, CONSTRAINTS_MAX, EXPRESSION_BYTES_MAX, PARAMETERS_BYTES_MAX, REQUESTS_MAX,
    SELECTORS_MAX, SUBREQUESTS_MAX,
};
use serde_json::{Value, json};

use super::expressions::Compiled;
use super::fields::{
    Causes, UNBOUNDED, by, checked, each, integer, invalid, itself, list, one_of, set, text,
    too_long, unsupported,
};
use super::names;
use crate::status::Cause;

const TAINT_EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];

/// Names of requests, each with the names of its subrequests.
pub(super) struct RequestNames<'a>(BTreeMap<&'a str, BTreeSet<&'a str>>);

impl<'a> RequestNames<'a> {
    /// Returns the names of the requests in a claim's `spec.devices`.
    pub(super) fn of(devices: &'a Value) -> Self {
        let requests = list(devices, "requests").iter();
        Self(
            requests
                .map(|request| (text(request, "name"), subrequest_names(request)))
                .collect(),
        )
    }

    /// Returns true if `name` is a request, or a subrequest after its request and a slash.
    fn has(&self, name: &str) -> bool {
        match name.split_once('/') {
            None => self.0.contains_key(name),
            Some((request, sub)) => self.0.get(request).is_some_and(|names| names.contains(sub)),
        }
    }

    /// Checks a reference to a request.
    pub(super) fn check(&self, causes: &mut Causes, field: &str, name: &str) {
        const WHY: &str = "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
        let segments: Vec<&str> = name.split('/').collect();
        if segments.len() > 2 {
            causes.push(invalid(field, name, WHY));
            return;
        }
        for segment in segments {
            names::refuse(causes, field, segment, names::label(segment));
        }
        if !self.has(name) {
            causes.push(invalid(field, name, WHY));
        }
    }

    /// Checks `requests` of a constraint or configuration.
    pub(super) fn check_list(&self, causes: &mut Causes, at: &str, object: &Value) {
        set(
            causes,
            at,
            object,
            "requests",
            REQUESTS_MAX,
            itself,
            |causes, field, name| {
                self.check(causes, field, name.as_str().unwrap_or_default());
            },
        );
    }
}

fn subrequest_names(request: &Value) -> BTreeSet<&str> {
    list(request, "firstAvailable")
        .iter()
        .map(|sub| text(sub, "name"))
        .collect()
}

/// Checks the spec of a claim at `at`: `spec`, and `spec.spec` in a template.
pub(super) fn spec(causes: &mut Causes, at: &str, spec: &Value, compiled: &Compiled) {
    let (at, devices) = (format!("{at}.devices"), &spec["devices"]);
    let requests = RequestNames::of(devices);
    set(
        causes,
        &at,
        devices,
        "requests",
        REQUESTS_MAX,
        by("name"),
        |causes, at, asked| {
            request(causes, at, asked, compiled);
        },
    );
    each(
        causes,
        &at,
        devices,
        "constraints",
        CONSTRAINTS_MAX,
        |causes, at, constraint| {
            requests.check_list(causes, at, constraint);
            attribute_of(causes, at, constraint);
        },
    );
    each(
        causes,
        &at,
        devices,
        "config",
        CLAIM_CONFIGS_MAX,
        |causes, at, config| {
            requests.check_list(causes, at, config);
            configuration(causes, at, config, true);
        },
    );
}

fn request(causes: &mut Causes, at: &str, request: &Value, compiled: &Compiled) {
    let name = text(request, "name");
    names::refuse(causes, &format!("{at}.name"), name, names::label(name));
    let why = "must have one of `exactly` and `firstAvailable`";
    match (
        request["exactly"].is_null(),
        list(request, "firstAvailable").is_empty(),
    ) {
        (true, true) => causes.push(Cause::required(at, why)),
        (false, false) => {
            causes.push(Cause::invalid(at, r#"["exactly","firstAvailable"]"#, why));
        }
        (true, false) => {
            set(
                causes,
                at,
                request,
                "firstAvailable",
                SUBREQUESTS_MAX,
                by("name"),
                |causes, at, sub| {
                    let name = text(sub, "name");
                    names::refuse(causes, &format!("{at}.name"), name, names::label(name));
                    devices(causes, at, sub, compiled);
                },
            );
        }
        (false, true) => devices(
            causes,
            &format!("{at}.exactly"),
            &request["exactly"],
            compiled,
        ),
    }
}

/// Checks the fields that an exact request and a subrequest have in common.
fn devices(causes: &mut Causes, at: &str, request: &Value, compiled: &Compiled) {
    let (field, class) = (
        format!("{at}.deviceClassName"),
        text(request, "deviceClassName"),
    );
    match class {
        "" => causes.push(Cause::required(field, "")),
        class => names::refuse(causes, &field, class, names::subdomain(class)),
    }
    selectors(causes, at, request, compiled);
    amount(causes, at, request);
    each(causes, at, request, "tolerations", UNBOUNDED, toleration);
}

fn amount(causes: &mut Causes, at: &str, request: &Value) {
    let (field, count) = (format!("{at}.count"), integer(request, "count"));
    match text(request, "allocationMode") {
        "All" if count != 0 => {
            let why = "must not be specified when allocationMode is 'All'";
            causes.push(Cause::invalid(field, count, why));
        }
        "ExactCount" if count <= 0 => {
            causes.push(Cause::invalid(field, count, "must be greater than zero"))
        }
        "All" | "ExactCount" => {}
        other => causes.push(unsupported(
            format!("{at}.allocationMode"),
            other,
            &["All", "ExactCount"],
        )),
    }
}

/// Checks `selectors` of a request or a class.
pub(super) fn selectors(causes: &mut Causes, at: &str, object: &Value, compiled: &Compiled) {
    each(
        causes,
        at,
        object,
        "selectors",
        SELECTORS_MAX,
        |causes, at, selector| {
            if selector["cel"].is_null() {
                causes.push(Cause::required(format!("{at}.cel"), ""));
                return;
            }
            let (field, expression) = (
                format!("{at}.cel.expression"),
                text(&selector["cel"], "expression"),
            );
            if expression.len() > EXPRESSION_BYTES_MAX {
                causes.push(too_long(field, EXPRESSION_BYTES_MAX));
            } else if let Some(problem) = compiled.problem(expression) {
                causes.push(invalid(field, expression, problem));
            }
        },
    );
}

fn toleration(causes: &mut Causes, at: &str, toleration: &Value) {
    let (key, value) = (text(toleration, "key"), text(toleration, "value"));
    if !key.is_empty() {
        names::refuse(causes, &format!("{at}.key"), key, names::label_key(key));
    }
    match text(toleration, "operator") {
        "Exists" if !value.is_empty() => {
            causes.push(invalid(
                format!("{at}.value"),
                value,
                "must be empty for operator `Exists`",
            ));
        }
        "Exists" => {}
        "Equal" => names::refuse(
            causes,
            &format!("{at}.value"),
            value,
            names::label_value(value),
        ),
        other => one_of(
            causes,
            &format!("{at}.operator"),
            other,
            &["Equal", "Exists"],
        ),
    }
    match text(toleration, "effect") {
        "" => {}
        effect => one_of(causes, &format!("{at}.effect"), effect, &TAINT_EFFECTS),
    }
}

/// Checks a taint of a device or a rule.
pub(super) fn taint(causes: &mut Causes, at: &str, taint: &Value) {
    checked(causes, at, |findings| {
        check::taint(findings, text(taint, "key"), text(taint, "value"));
    });
    one_of(
        causes,
        &format!("{at}.effect"),
        text(taint, "effect"),
        &TAINT_EFFECTS,
    );
}

/// The attribute that a constraint is about. Two are not refused by an API server: the second is not read.
fn attribute_of(causes: &mut Causes, at: &str, constraint: &Value) {
    let attributes = ["matchAttribute", "distinctAttribute"].into_iter();
    match attributes
        .into_iter()
        .find(|key| !constraint[*key].is_null())
    {
        Some(key) => names::fully_qualified(causes, &format!("{at}.{key}"), text(constraint, key)),
        None => {
            let why = "must have `matchAttribute` or `distinctAttribute`";
            causes.push(Cause::required(at, why));
        }
    }
}

/// Checks the opaque parameters of a claim, a class or an allocation. The size of parameters that are stored already is not checked.
pub(super) fn configuration(causes: &mut Causes, at: &str, config: &Value, is_new: bool) {
    let (at, opaque) = (format!("{at}.opaque"), &config["opaque"]);
    if opaque.is_null() {
        causes.push(Cause::required(at, ""));
        return;
    }
    names::driver(causes, &format!("{at}.driver"), text(opaque, "driver"));
    let most = if is_new {
        PARAMETERS_BYTES_MAX
    } else {
        usize::MAX
    };
    raw(
        causes,
        &format!("{at}.parameters"),
        &opaque["parameters"],
        most,
    );
}

/// Checks a document that only a driver reads.
pub(super) fn raw(causes: &mut Causes, field: &str, document: &Value, most: usize) {
    if document.is_null() {
        causes.push(Cause::required(field, ""));
    } else if document.to_string().len() > most {
        causes.push(too_long(field, most));
    } else if !document.is_object() {
        causes.push(Cause::invalid(
            field,
            json!("<value omitted>"),
            "must be a valid JSON object",
        ));
    }
}
