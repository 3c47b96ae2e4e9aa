//! ADMIN: what people and programs may ask of Postrider, written once.
//!
//! The HTTP API, the page and the command line are skins over [`Desk`]: they parse, call and print, so that
//! the three can never disagree about what a request means or what its answer looks like.

mod contract;
mod desk;
mod fields;
mod payload;
mod problem;
mod reconcile;
mod request;
mod topology;
mod view;

pub use contract::{Contract, Part};
pub use desk::{BulkAnswer, Desk, Express, Progress};
pub use fields::nearest;
pub use payload::{Encoding, Payload};
pub use problem::{Problem, ProblemKind};
pub use reconcile::{
    BrokerComparison, BrokerSide, Difference, DifferenceView, GroupComparison, OutboxCounts,
    ReconcileRequest, ReconcileView, Sides, TopicComparison,
};
pub use request::{
    AcknowledgeRequest, BulkRequest, EditRequest, IdFrom, LanesRequest, ListFilter, PageRequest, SendRequest,
    TestRequest,
};
pub use topology::{ConsumerView, RetryView, RouteView, Topology};
pub use view::{
    AcknowledgeAnswer, AcknowledgementView, ActionAnswer, AttemptView, AuditView, CountsView, DeadView,
    HoldView, InboxCountsView, LaneRow, LanesAnswer, LanesView, LatencyView, MessageView, PageView,
    ParkedView, ProcessedView, Refusal, SendAnswer,
};
