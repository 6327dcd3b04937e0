//! The form in which a client wants objects: whole, their metadata, or rows of a table.

use serde_json::{Value, json};

use crate::negotiate::{Form, MetaVersion, form};
use crate::reads::metadata_only;
use crate::route::Route;
use crate::status::{self, Refusal};
use crate::table::{IncludeObject, table};

/// The form of objects in an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    form: Form,
    include: IncludeObject,
}

impl Shape {
    pub(crate) fn of(route: &Route, accept: &str) -> Result<Self, Refusal> {
        let include =
            IncludeObject::parse(route.asked("includeObject")).map_err(status::bad_request)?;
        Ok(Self {
            form: form(accept)?,
            include,
        })
    }

    /// An object or a list, as it is served.
    pub(crate) fn of_object(self, route: &Route, object: Value) -> Value {
        match self.form {
            Form::Metadata(version) => metadata_only(&object, version),
            Form::Table(version) => self.rows(route, version, &object),
            Form::Whole | Form::AggregatedDiscovery => object,
        }
    }

    fn rows(self, route: &Route, version: MetaVersion, object: &Value) -> Value {
        let (objects, metadata) = match object["items"].as_array() {
            Some(items) => (items.as_slice(), object["metadata"].clone()),
            None => {
                let version = &object["metadata"]["resourceVersion"];
                (
                    std::slice::from_ref(object),
                    json!({ "resourceVersion": version }),
                )
            }
        };
        let mut table = table(
            &route.api_version(),
            route.resource.kind,
            objects,
            &metadata,
            self.include,
            jiff::Timestamp::now(),
        );
        table["apiVersion"] = version.api_version().into();
        table
    }

    /// A bookmark has no rows.
    pub(crate) fn of_bookmark(self, route: &Route, object: Value) -> Value {
        match self.form {
            Form::Table(version) => {
                let metadata = object["metadata"].clone();
                let mut table = table(
                    &route.api_version(),
                    route.resource.kind,
                    [],
                    &metadata,
                    self.include,
                    jiff::Timestamp::now(),
                );
                table["apiVersion"] = version.api_version().into();
                table
            }
            _ => self.of_object(route, object),
        }
    }
}
