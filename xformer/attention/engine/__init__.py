"""Softmax attention over tiles of the score matrix, forward and backward, in memory linear in the length.

In reading order:
- `tile_plan` says which tiles are visited: `tile_listing` lists those of a pattern, `plan_making` puts them in order.
  `drawn_tiles` are those of random blocks; the rest of a plan is made once for all layers.
- `operands` holds a call in the engine's terms.
- `attend` runs the plan and has the custom derivative; `forward` (the online softmax) and `backward` do a query tile.
- `listed_tiles` runs lists of tiles that were made on the device, one for every example; `offset_tiles` makes such a
  list where it is known only at run time where queries stand.
- `query_tile` reads a tile's queries, keys, scores and masks, by the operations of `gather`.
- `distance_table` and `relative_tiles` add relative positions; `relative_by_position`, for given positions.
- `sequence_parallel` shares a plan out to devices; `mesh_axes` serves meshes.
- `dense` is the plain definition that all must equal.
"""
