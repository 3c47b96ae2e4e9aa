//! What is promised for each route and each group, by what, and what remains.

use std::collections::BTreeMap;

use message::Semantics;
use serde::Serialize;
use utoipa::ToSchema;

/// What holds of an installation.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Contract {
    /// Where messages wait.
    pub store: Part,
    /// Where topics go.
    pub routes: Vec<Part>,
    /// Who listens.
    pub consumers: Vec<Part>,
}

/// What holds of one thing.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// The word in the configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "effectively-once")]
    pub semantics: Option<Semantics>,
    /// Why that was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What can be relied on.
    pub promises: Vec<String>,
    /// How that is done.
    pub mechanisms: Vec<String>,
    /// When a message can be lost, or needs a person.
    pub loss: Vec<String>,
    /// When it can come or be done twice.
    pub duplicates: Vec<String>,
    /// The settings that all this hangs on.
    pub settings: BTreeMap<String, String>,
    /// How the broker itself must be set up.
    pub needs: Vec<String>,
}
