//! Initial values of a new object, beside the defaults of its fields.

use serde_json::{Value, json};

use crate::route::Route;

/// Sets the status that an object begins with. A client cannot create an object with a status; a Node's, which the
/// kubelet reports at once, is the exception.
pub(crate) fn begin(route: &Route, object: &mut Value) {
    match route.resource.plural {
        "resourceclaims" => object["status"] = json!({}),
        "pods" => {
            object["status"] = json!({ "phase": "Pending", "qosClass": "BestEffort" });
        }
        "namespaces" => {
            object["spec"] = json!({ "finalizers": ["kubernetes"] });
            object["status"] = json!({ "phase": "Active" });
            let name = object["metadata"]["name"].clone();
            if !object["metadata"]["labels"].is_object() {
                object["metadata"]["labels"] = json!({});
            }
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
        }
        "devicetaintrules" => drop(object.as_object_mut().map(|fields| fields.remove("status"))),
        _ => {}
    }
}
